"""Inline ephemeral volumes: created by their publish, removed by their unpublish, and by nothing else."""

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crust import errors, metrics, operations, volumes
from crust.blockdriver.controller import create_volume
from crust.blockdriver.node.node_unstage import NodeUnstage
from crust.blockdriver.node.publish import ephemeral, ephemeral_orphans
from crust.blockdriver.records.volume_record import VolumeRecord
from crust.host.block import loop, loop_devices
from crust.host.filesystems import mkfs
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import boot
from crust.settings.driver import OWN_DRIVER
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, block, caller, is_there, mount

pytestmark = pytest.mark.root

VOLUME = f"csi-{'0a' * 32}"


def remains(bench: Bench) -> list[str]:
    images = [each.name for each in (bench.root / "state" / "images").iterdir()]
    devices = [each.path for each in loop_devices.list_all() if str(bench.root) in each.backing]
    return [*images, *devices, *bench.driver.stores.volume_records.ids()]


async def listed(bench: Bench) -> list[str]:
    answer = await bench.driver.controller.ListVolumes(csi_pb2.ListVolumesRequest(), caller())
    return [each.volume.volume_id for each in answer.entries]


async def test_ephemeral_volume_has_the_pods_size_and_is_removed_by_unpublish(bench: Bench) -> None:
    target = bench.target("a")
    await bench.inline(VOLUME, target, attributes={"size": "64Mi"})
    await bench.inline(VOLUME, target, attributes={"size": "64Mi"})
    Path(target, "file").write_text("words")
    stats = await bench.stats(VOLUME, target)
    assert 48 * MIB < stats.usage[0].total <= 64 * MIB
    assert await listed(bench) == []
    await bench.unpublish(VOLUME, target)
    assert not is_there(target)
    assert remains(bench) == []
    await bench.unpublish(VOLUME, target)


async def test_ephemeral_volume_keeps_its_data_across_a_reboot(bench: Bench) -> None:
    target = bench.target("a")
    await bench.inline(VOLUME, target, attributes={"size": "64Mi"})
    Path(target, "file").write_text("words")
    mount_api.unmount(target)
    bench.restart()
    await bench.inline(VOLUME, target, attributes={"size": "64Mi"})
    assert Path(target, "file").read_text() == "words"
    with pytest.raises(create_volume.VolumeExistsDifferently):
        await bench.inline(VOLUME, target, attributes={"size": "1Gi"})
    assert Path(target, "file").read_text() == "words"
    bench.restart()
    await bench.unpublish(VOLUME, target)
    assert remains(bench) == []


@pytest.mark.parametrize(
    "attributes", [{"size": "-1"}, {"size": "1.5Gi"}, {"size": "0"}, {"odd": "x"}, {"size": "64Pi"}]
)
async def test_ephemeral_publish_with_invalid_attributes_leaves_nothing(
    bench: Bench, attributes: dict[str, str]
) -> None:
    with pytest.raises(errors.InvalidRequest):
        await bench.inline(VOLUME, bench.target("a"), attributes=attributes)
    assert remains(bench) == []


async def test_ephemeral_publish_that_fails_removes_its_volume(bench: Bench) -> None:
    outside = "/proc/self/outside"
    with pytest.raises(errors.CrustError):
        await bench.inline(VOLUME, outside, attributes={"size": "64Mi"})
    assert remains(bench) == []
    with pytest.raises(errors.Exhausted):
        await bench.inline(VOLUME, bench.target("a"), attributes={"size": "9Ti"})
    assert remains(bench) == []


async def test_ephemeral_publish_that_fails_removes_an_interrupted_volume(
    bench: Bench,
) -> None:
    target, own = bench.target("a"), bench.driver.node_rules.ephemeral.id_of(VOLUME)
    await bench.inline(VOLUME, target, attributes={"size": "64Mi"})
    record = bench.driver.stores.volume_records.load(own)
    begun = VolumeRecord.parse(record.but(phase="creating").encode(), "before")
    await bench.unpublish(VOLUME, target)
    bench.driver.stores.volume_records.save(begun)  # as if the driver had died after it wrote this
    with pytest.raises(errors.InvalidRequest, match="bogus"):
        await bench.inline(VOLUME, target, mount("ext4", "bogus"), attributes={"size": "64Mi"})
    assert remains(bench) == []


async def test_ephemeral_publish_reports_the_first_error_if_cleanup_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bench.target("a")

    async def held(*_: object) -> None:
        raise errors.NotReady("another process holds the device")

    with monkeypatch.context() as patched:
        patched.setattr(NodeUnstage, "unstage", held)
        with pytest.raises(errors.InvalidRequest, match="bogus"):
            await bench.inline(VOLUME, target, mount("ext4", "bogus"), attributes={"size": "64Mi"})
    await bench.unpublish(VOLUME, target)
    assert remains(bench) == []


async def test_ephemeral_volume_can_be_raw_or_deferred(bench: Bench) -> None:
    target = bench.target("a")
    await bench.inline(VOLUME, target, block(), attributes={"size": "16Mi"})
    assert Path(target).is_block_device()
    await bench.unpublish(VOLUME, target)
    answer = await bench.inline(VOLUME, target, attributes={"size": "64Mi"}, deferred=True)
    assert answer.deferred_mount.capacity_bytes == 64 * MIB
    assert not is_there(target)
    await bench.unpublish(VOLUME, target)
    assert remains(bench) == []


async def test_ephemeral_publish_of_a_created_volume_is_refused(bench: Bench) -> None:
    volume = await bench.create()
    target = bench.target("a")
    with pytest.raises(ephemeral.NotEphemeral):
        await bench.inline(volume.volume_id, target)
    await bench.stage(volume.volume_id)
    await bench.publish(volume.volume_id, target)
    await bench.unpublish(volume.volume_id, target)
    await bench.unstage(volume.volume_id)
    assert await listed(bench) == [volume.volume_id]


async def test_ephemeral_volume_is_not_removed_during_its_publish(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector knows it by the driver's id, the CO by its own: both lock the same volume."""
    target, own = bench.target("a"), bench.driver.node_rules.ephemeral.id_of(VOLUME)
    making, go_on = asyncio.Event(), asyncio.Event()
    make = mkfs.make

    async def wait_and_make(path: str, fs_type: str, **options: Any) -> None:
        making.set()
        await go_on.wait()
        await make(path, fs_type, **options)

    monkeypatch.setattr(mkfs, "make", wait_and_make)
    publish = asyncio.create_task(bench.inline(VOLUME, target, attributes={"size": "64Mi"}))
    await making.wait()
    await bench.driver.collect_garbage(grace_s=0)
    with pytest.raises(operations.OperationInProgress):
        await bench.expand(own, target)
    with pytest.raises(operations.OperationInProgress):
        await bench.unpublish(VOLUME, target)
    go_on.set()
    await publish
    Path(target, "file").write_text("words")
    await bench.unpublish(VOLUME, target)
    assert remains(bench) == []


async def test_ephemeral_publish_retry_with_fresh_tokens_joins_the_running_one(
    bench: Bench,
) -> None:
    target, key = bench.target("a"), "csi.storage.k8s.io/serviceAccount.tokens"
    await asyncio.gather(
        bench.inline(VOLUME, target, attributes={"size": "64Mi", key: "one"}),
        bench.inline(VOLUME, target, attributes={"size": "64Mi", key: "two"}),
    )
    await bench.unpublish(VOLUME, target)
    assert remains(bench) == []


async def test_ephemeral_unpublish_of_a_damaged_volume_succeeds(bench: Bench) -> None:
    target, own = bench.target("a"), bench.driver.node_rules.ephemeral.id_of(VOLUME)
    await bench.inline(VOLUME, target, attributes={"size": "64Mi"})
    (bench.root / "state" / "records" / f"{own}.json").write_text("no record")
    for _ in range(2):
        await bench.unpublish(VOLUME, target)
        assert not is_there(target)
        assert remains(bench) == [f"{own}.img", own]
        bench.restart()
    health = bench.driver.node._rules.health_check.examine(own)
    assert [each.reason for each in health.findings] == ["RecordUnreadable"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds since boot, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(ephemeral_orphans, "seconds_since_boot", lambda: now[0])
    return now


@pytest.fixture
def reboot(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Mounts and devices go, and the boot id changes."""

    def act() -> None:
        for mounted in mountinfo.below(str(bench.root)):
            mount_api.unmount(mounted.target)
        for device in loop_devices.list_all():
            if str(bench.root) in device.backing:
                loop.detach(device)
        new = str(uuid.uuid4())
        monkeypatch.setattr(boot, "boot_id", lambda: new)
        bench.restart()

    return act


async def test_ephemeral_volume_that_the_co_forgot_is_deleted_after_the_grace(
    bench: Bench,
    clock: list[float],
    reboot: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = bench.driver.node_rules.ephemeral.id_of(VOLUME)
    kept = (await bench.create()).volume_id
    await bench.inline(VOLUME, bench.target("a"), attributes={"size": "64Mi"})
    assert await bench.driver.collect_garbage() == ()
    reboot()
    assert await bench.driver.collect_garbage() == ()
    assert metrics.unused_ephemeral_volumes.labels(OWN_DRIVER)._value.get() == 1
    [finding] = bench.driver.controller_rules.health_check.pool()
    assert (finding.reachable, finding.reason) == (True, "EphemeralVolumesUnused")
    clock[0] += 3599
    bench.restart()
    assert await bench.driver.collect_garbage() == ()
    clock[0] += 1
    assert await bench.driver.collect_garbage() == (own,)
    [told] = [each for each in caplog.records if each.message.startswith("deleted an ephemeral")]
    assert (told.__dict__["volume_id"], told.__dict__["unused_s"]) == (own, 3600)
    assert bench.driver.stores.volume_records.ids() == (kept,)
    assert remains(bench) == [f"{kept}.img", kept]
    assert await bench.driver.collect_garbage() == ()
    assert bench.driver.controller_rules.health_check.pool() == ()
    assert list((bench.root / "run" / "unused").iterdir()) == []


async def test_ephemeral_volume_in_use_is_never_deleted_however_old(
    bench: Bench, clock: list[float]
) -> None:
    shown, deferred = bench.target("shown"), bench.target("deferred")
    other = f"csi-{'0b' * 32}"
    await bench.inline(VOLUME, shown, attributes={"size": "64Mi"})
    await bench.inline(other, deferred, attributes={"size": "64Mi"}, deferred=True)
    attached = bench.driver.node_rules.ephemeral.id_of(VOLUME)
    for _ in range(3):
        clock[0] += 10_000
        assert await bench.driver.collect_garbage() == ()
        bench.restart()
    # without an entry of the node state the device alone says that it is used
    bench.driver.stores.node_state.forget_staged(attached)
    bench.driver.stores.node_state.forget_published(volumes.TargetPath(shown))
    for _ in range(2):
        clock[0] += 10_000
        assert await bench.driver.collect_garbage() == ()
    for volume_id, target in ((VOLUME, shown), (other, deferred)):
        await bench.unpublish(volume_id, target)
    assert remains(bench) == []


async def test_grace_of_an_unused_ephemeral_volume_restarts_with_a_reboot_and_a_tried_publish(
    bench: Bench, clock: list[float], reboot: Callable[[], None]
) -> None:
    target = bench.target("a")
    await bench.inline(VOLUME, target, attributes={"size": "64Mi"})
    Path(target, "file").write_text("words")
    for restart in (reboot, reboot):
        restart()
        assert await bench.driver.collect_garbage() == ()
        clock[0] += 3000
    with pytest.raises(errors.InvalidRequest, match="bogus"):
        await bench.inline(VOLUME, target, mount("ext4", "bogus"), attributes={"size": "64Mi"})
    clock[0] += 3000
    assert await bench.driver.collect_garbage() == ()
    await bench.inline(VOLUME, target, attributes={"size": "64Mi"})
    assert Path(target, "file").read_text() == "words"
    await bench.unpublish(VOLUME, target)
    assert remains(bench) == []


async def test_unreadable_note_of_an_unused_ephemeral_volume_restarts_the_grace(
    bench: Bench, clock: list[float], reboot: Callable[[], None]
) -> None:
    own = bench.driver.node_rules.ephemeral.id_of(VOLUME)
    await bench.inline(VOLUME, bench.target("a"), attributes={"size": "64Mi"})
    reboot()
    await bench.driver.collect_garbage()
    (bench.root / "run" / "unused" / own).write_bytes(b"\xff")
    clock[0] += 10_000
    assert await bench.driver.collect_garbage() == ()
    clock[0] += 3600
    assert await bench.driver.collect_garbage() == (own,)


def test_ephemeral_size_accepts_kubernetes_quantities() -> None:
    assert ephemeral.size_bytes("1") == 1
    assert ephemeral.size_bytes("64Mi") == 64 * MIB
    assert ephemeral.size_bytes("5G") == 5 * 10**9
