"""Inline ephemeral volumes: created by their publish, removed by their unpublish, and by nothing else."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from crust import errors, operations
from crust.blockdriver.controller import create_volume
from crust.blockdriver.node import ephemeral
from crust.blockdriver.node.node_unstage import NodeUnstage
from crust.host.block import loop
from crust.host.filesystems import mkfs
from crust.host.mounts import mount_api
from crust.wire.csi.v1 import csi_pb2
from tests.support.block_driver import MIB, Bench, block, caller, is_there, mount

pytestmark = pytest.mark.root

VOLUME = f"csi-{'0a' * 32}"


def remains(bench: Bench) -> list[str]:
    images = [each.name for each in (bench.root / "state" / "images").iterdir()]
    devices = [each.path for each in loop.list_all() if str(bench.root) in each.backing]
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
    begun = record.but(phase="creating")
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


def test_ephemeral_size_accepts_kubernetes_quantities() -> None:
    assert ephemeral.size_bytes("1") == 1
    assert ephemeral.size_bytes("64Mi") == 64 * MIB
    assert ephemeral.size_bytes("5G") == 5 * 10**9
