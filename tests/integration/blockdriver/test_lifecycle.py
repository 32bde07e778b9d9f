"""The life of a volume on real loop devices and mounts, and of one whose filesystem only guests make and read."""

import asyncio
import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.engines import protocol
from crust.blockdriver.records.capability_check import PublishedToOtherNode
from crust.blockdriver.records.models import Attached, Usage
from crust.core import errors, volumes
from crust.host import answers
from crust.host.block import devices, loop, signatures
from crust.host.mounts import mount_api, mountinfo
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import encoded, publish_request
from tests.support.drivers.block_driver import MIB, Bench, block, caller, is_there, mount
from tests.support.probes import probed
from tests.support.raised import raised
from tests.support.records import pool_layout, zfs_bytes

pytestmark = pytest.mark.root


async def test_delete_of_a_staged_volume_is_refused(bench: Bench) -> None:
    volume_id = await bench.staged()
    with pytest.raises(protocol.StillAttached, match="staged at"):
        await bench.delete(volume_id)
    await bench.unstage(volume_id)
    await bench.delete(volume_id)


async def test_unstage_of_the_last_path_detaches_the_volume(bench: Bench) -> None:
    volume = await bench.create()
    first, second = (bench.staging(volume.volume_id, name) for name in ("one", "two"))
    await bench.stage(volume.volume_id, path=first)
    await bench.stage(volume.volume_id, path=second)
    image = str(bench.image(volume.volume_id))
    assert len(loop.find(image)) == 1
    await bench.unstage(volume.volume_id, path=first)
    await bench.publish(volume.volume_id, bench.target("pod-a"), path=second)
    await bench.unpublish(volume.volume_id, bench.target("pod-a"))
    await bench.unstage(volume.volume_id, path=second)
    assert loop.find(image) == ()


async def test_stage_after_a_detach_by_hand_keeps_other_staging_paths(bench: Bench) -> None:
    volume_id = (await bench.create()).volume_id
    first, second = (bench.staging(volume_id, name) for name in ("one", "two"))
    await bench.stage(volume_id, path=first)
    image = str(bench.image(volume_id))
    [device] = loop.find(image)
    loop.detach(device)
    await bench.stage(volume_id, path=second)
    await bench.publish(volume_id, bench.target("pod-a"), path=first)
    await bench.unpublish(volume_id, bench.target("pod-a"))
    await bench.unstage(volume_id, path=second)
    assert len(loop.find(image)) == 1, "it is staged at the first path"
    await bench.unstage(volume_id, path=first)
    assert loop.find(image) == ()


async def test_other_staging_path_that_is_not_seen_keeps_the_device(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_id = (await bench.create()).volume_id
    first, second = (bench.staging(volume_id, name) for name in ("one", "two"))
    for path in (first, second):
        await bench.stage(volume_id, path=path)
    real = os.stat

    def lied(path: Any, **options: Any) -> os.stat_result:
        if path == first:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lied)
        with pytest.raises(answers.NotSeen, match="EACCES"):
            await bench.unstage(volume_id, path=second)
    assert len(loop.find(str(bench.image(volume_id)))) == 1
    await bench.unstage(volume_id, path=second)
    assert len(loop.find(str(bench.image(volume_id)))) == 1, "it is staged at the first path"


async def test_truncated_image_is_an_abnormal_condition(bench: Bench) -> None:
    volume_id, target = await bench.published()
    image = bench.image(volume_id)
    os.rename(image, image.with_suffix(".moved"))
    stats = await bench.stats(volume_id, target)
    assert stats.condition is not None
    assert stats.condition.abnormal
    assert "does not exist" in stats.condition.message
    os.rename(image.with_suffix(".moved"), image)


async def test_publish_with_group_0_is_refused_only_if_deferred(bench: Bench) -> None:
    """A pod with fsGroup 0 is nothing unusual."""
    volume_id, target = await bench.staged(), bench.target("pod-a")
    await bench.publish(volume_id, target, mount(group=volumes.GroupChange(2345)))
    (Path(target) / "file").touch(mode=0o600)
    await bench.unpublish(volume_id, target)
    root = mount(group=volumes.GroupChange(0))
    await bench.publish(volume_id, target, root)
    assert (Path(target) / "file").stat().st_gid == 0
    assert (Path(target) / "file").stat().st_mode & 0o660 == 0o660
    await bench.unpublish(volume_id, target)
    request = publish_request(volume_id, target, encoded(root), staging=bench.staging(volume_id))
    with raised("RootGroupNotDeferrable"):
        await bench.driver.node.NodePublishVolume(request, caller())


async def test_unpublish_without_record_or_node_state_succeeds(bench: Bench) -> None:
    volume = await bench.create()
    target = bench.target("pod-a")
    await bench.up(volume.volume_id, target)
    for path in bench.root.glob("run/*/*/*"):
        path.unlink()
    bench.restart()
    await bench.unpublish("some-unknown-volume", bench.target("pod-b"))
    await bench.unpublish(volume.volume_id, target)
    assert mountinfo.at(target) is None
    assert not is_there(target)


async def test_stage_formats_with_the_storage_class_options(bench: Bench) -> None:
    sent = {"crust.dev/ext4-bytes-per-inode": "65536", "crust.dev/ext4-reserved-percent": "5"}
    target = bench.target("pod-a")
    volume_id = (await bench.create(size=64 * MIB, parameters=sent)).volume_id
    await bench.up(volume_id, target)
    space = os.statvfs(target)
    assert space.f_files == 64 * MIB // 65536
    assert space.f_bfree - space.f_bavail >= space.f_blocks // 25


TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"


@contextmanager
def held(path: str) -> Iterator[None]:
    """With the loop device by which a kubelet holds a raw volume's device."""
    argv = ["losetup", "--find", "--show", path]
    holder = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    try:
        yield
    finally:
        subprocess.run(["losetup", "--detach", holder], check=True)


async def test_kubelet_maps_and_unmaps_a_raw_volume(bench: Bench) -> None:
    volume_id = (await bench.create(capability=block())).volume_id
    kubelets = bench.root / "volumeDevices"
    (kubelets / "publish").mkdir(parents=True)
    (kubelets / "dev").mkdir()
    target, bound = f"{kubelets}/publish/pod-uid", kubelets / "dev" / "pod-uid"
    await bench.up(volume_id, target, block())
    bound.touch()
    mount_api.bind(target, str(bound))

    with held(str(bound)):
        for path in (target, str(bound)):
            stats = await bench.stats(volume_id, path)
            assert stats.usage == (volumes.VolumeUsage(volumes.UsageUnit.BYTES, 64 * MIB, 0, 0),)
        await bench.grow(volume_id, 128 * MIB)
        assert devices.size_bytes(str(bound)) == 128 * MIB
        assert await bench.expand(volume_id, target, 128 * MIB) == 128 * MIB
        bench.restart()
        await bench.publish(volume_id, target, block())

    mount_api.unmount(str(bound))
    await bench.down(volume_id, target)
    assert not is_there(target)
    await bench.delete(volume_id)


async def test_publish_repeated_with_fresh_tokens_succeeds(bench: Bench) -> None:
    volume_id, target = await bench.staged(), bench.target("pod-a")
    await bench.publish(volume_id, target, context={TOKENS: "first", "crust.dev/defer": "never"})
    before = mountinfo.at(target)
    with (Path(target) / "open").open("w"):
        for token in ("second", "third"):
            bench.restart()
            context = {TOKENS: token, "crust.dev/defer": "never"}
            await bench.publish(volume_id, target, context=context)
    assert mountinfo.at(target) == before
    written = b"".join(path.read_bytes() for path in bench.root.glob("run/*/*/*.json"))
    assert b"first" not in written
    assert b"third" not in written


async def test_unpublish_leaves_only_the_kubelets_file_in_the_pod_directory(bench: Bench) -> None:
    """It is removed by rmdir alone; anything of ours would keep the pod there for good."""
    volume_id = (await bench.create()).volume_id
    target = Path(bench.target("pod-a"))
    (target.parent / "vol_data.json").write_text("{}")
    await bench.stage(volume_id)
    for deferred in (False, True):
        await bench.publish(volume_id, str(target), deferred=deferred)
        assert set(os.listdir(target.parent)) <= {"vol_data.json", "mount"}
        bench.restart()
        await bench.unpublish(volume_id, str(target))
        assert os.listdir(target.parent) == ["vol_data.json"]
    assert os.listdir(bench.staging(volume_id)) == []


async def test_unpublish_after_a_reboot_succeeds_without_node_state(bench: Bench) -> None:
    """After a reboot nothing is mounted or attached, and the kubelet takes down what its files say was up."""
    volume_id = (await bench.create()).volume_id
    target = Path(bench.target("pod-a"))
    target.mkdir()
    await bench.unpublish(volume_id, str(target))
    assert not target.exists()
    await bench.unstage(volume_id)
    await bench.unstage(volume_id, path=f"{bench.root}/staging/removed-meanwhile")
    await bench.delete(volume_id)
    await bench.down(volume_id, str(target))


async def test_volume_published_read_only_to_a_node_refuses_writes(bench: Bench) -> None:
    volume_id = await bench.staged()
    target = bench.target("a")
    await bench.publish(volume_id, target)
    await bench.down(volume_id, target)
    await bench.attach(volume_id, readonly=True)
    bench.restart()
    await bench.up(volume_id, target)
    with pytest.raises(OSError, match="Read-only"):
        Path(target, "file").write_text("words")
    await bench.publish(volume_id, target)


async def test_stage_needs_no_controller_publish_unless_another_node_has_it(bench: Bench) -> None:
    """With attachRequired: false the CO publishes to no node; a moved pool may still name its old one."""
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    volume_records = bench.driver.stores.volume_records
    usage = Usage(kind="mount", fs_type="ext4", mode=7)
    elsewhere = Attached(node_id="renamed-since", usage=usage, readonly=False)
    volume_records.save(volume_records.load(volume_id).replaced(nodes=(elsewhere,)))
    with pytest.raises(PublishedToOtherNode, match="renamed-since"):
        await bench.stage(volume_id)
    assert bench.driver.stores.access.attached(volume_id) is None
    volume_records.save(volume_records.load(volume_id).replaced(nodes=()))
    await bench.stage(volume_id)


async def test_lost_image_is_reported_by_both_profiles_keeping_its_record(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    volume_id = (await bench.create(capability=mount())).volume_id
    image = pool_layout.image(tmp_path / "state", volume_id)
    image.rename(tmp_path / "away")
    entry = (await bench.co.volumes())[volume_id]
    assert entry.status.volume_condition.abnormal
    with raised("NotInCsiProfile"):
        await bench.driver.controller.ControllerListVolumeHealth(
            csi_pb2.ControllerListVolumeHealthRequest(), caller()
        )
    newer = Bench(tmp_path, profile="1.13")
    assert not (await newer.co.volumes())[volume_id].status.HasField("volume_condition")
    controller, node = newer.driver.controller, newer.driver.node
    answer = await controller.ControllerGetVolumeHealth(
        csi_pb2.ControllerGetVolumeHealthRequest(volume_id=volume_id), caller()
    )
    (status,) = answer.volume_health.health_statuses
    assert (status.status, status.reason) == (csi_pb2.DATA_LOSS, "ImageMissing")
    assert len(status.message.encode()) <= 128
    (tmp_path / "away").rename(image)
    healthy = await node.NodeGetVolumeHealth(
        csi_pb2.NodeGetVolumeHealthRequest(volume_id=volume_id), caller()
    )
    assert healthy.volume_health.volume_id == volume_id
    assert not healthy.volume_health.health_statuses
    pool = await node.NodeGetStorageHealth(csi_pb2.NodeGetStorageHealthRequest(), caller())
    assert not pool.backend_health
    image.parent.parent.rename(tmp_path / "pool")
    pool = await node.NodeGetStorageHealth(csi_pb2.NodeGetStorageHealthRequest(), caller())
    assert [health.status for health in pool.backend_health] == [csi_pb2.STORAGE_UNREACHABLE]


GUEST = {"crust.dev/format-in": "guest", "crust.dev/ext4-reserved-percent": "3"}
LUKS = {"crust.dev/encryption": "luks"}
SECRET = {"passphrase": "correct horse battery staple"}


async def test_volume_context_says_who_formats_and_what_is_encrypted(bench: Bench) -> None:
    volume = await bench.create(parameters={**GUEST, **LUKS})
    kept = {key: GUEST.get(key) or LUKS[key] for key in ("crust.dev/format-in", *LUKS)}
    assert dict(volume.volume_context) == kept


async def test_host_neither_makes_nor_reads_the_filesystem(bench: Bench) -> None:
    volume = await bench.create(parameters=GUEST)
    await bench.stage(volume.volume_id)
    assert not bench.image(volume.volume_id).read_bytes().strip(b"\0"), "it was formatted"
    with bench.image(volume.volume_id).open("r+b") as file:
        file.write(b"what no host can make sense of")
    await bench.unstage(volume.volume_id)
    await bench.stage(volume.volume_id)  # ContentInDoubt for any other volume
    with raised("FilesystemOfGuest"):
        await bench.publish(volume.volume_id, bench.target("pod-a"))


@pytest.mark.parametrize("parameters", [GUEST, LUKS])
async def test_content_record_alone_forbids_the_host_to_parse(
    bench: Bench, parameters: dict[str, str]
) -> None:
    """Whatever the parameters of the volume say: they are compared with a repeated request, and decide nothing."""
    volume_id = volumes.VolumeId((await bench.create(parameters=parameters)).volume_id)
    records = bench.driver.stores.volume_records
    records.save(records.load(volume_id).replaced(parameters={}))
    await bench.stage(volume_id)
    assert not bench.image(volume_id).read_bytes().strip(b"\0"), "it was formatted"
    with raised("EncryptedOnHost" if parameters is LUKS else "FilesystemOfGuest"):
        await bench.publish(volume_id, bench.target("pod-a"))
    answer = await bench.publish(volume_id, bench.target("pod-a"), deferred=True, secrets=SECRET)
    assert answer.deferred_mount.encryption == parameters.get("crust.dev/encryption", "")


async def test_guest_is_told_to_format_until_pod_had_raw_device(bench: Bench) -> None:
    volume, target = await bench.create(parameters=GUEST), bench.target("pod-a")
    for _ in range(2):  # the first guest may have gone before it made anything
        await bench.stage(volume.volume_id)
        answer = await bench.publish(volume.volume_id, target, deferred=True)
        assert answer.deferred_mount.HasField("format")
        assert answer.deferred_mount.format.ext4_reserved_percent == 3
        await bench.down(volume.volume_id, target)
    await bench.up(volume.volume_id, target, block())
    await bench.down(volume.volume_id, target)
    await bench.stage(volume.volume_id)
    answer = await bench.publish(volume.volume_id, target, deferred=True)
    assert not answer.deferred_mount.HasField("format")


@pytest.mark.parametrize("fs_type", ["ext4", "xfs"])
async def test_raw_volume_with_another_formats_bytes_is_mounted(bench: Bench, fs_type: str) -> None:
    """A pod made the filesystem, and kept a disk image on it (util-linux #4031): each stage was refused for ever."""
    volume_id, target = await bench.published("pvc-raw", block(), size=304 * MIB)
    await asyncio.to_thread(subprocess.run, [f"mkfs.{fs_type}", "-q", target], check=True)
    await bench.down(volume_id, target)
    zfs_bytes.write(bench.image(volume_id))
    assert probed(str(bench.image(volume_id))) == signatures.Ambiguous()
    await bench.up(volume_id, target, mount(fs_type))
    await bench.down(volume_id, target)


async def test_encrypted_volume_has_passphrase_of_its_stage_or_its_publish(
    bench: Bench,
) -> None:
    volume, target = await bench.create(parameters=LUKS), bench.target("pod-a")
    await bench.stage(volume.volume_id, secrets=SECRET)
    answer = await bench.publish(volume.volume_id, target, deferred=True)
    mount = answer.deferred_mount
    assert (mount.encryption, dict(mount.secrets)) == ("luks", SECRET)
    assert mount.HasField("format")
    newer = {"passphrase": "of the publish"}
    answer = await bench.publish(volume.volume_id, target, deferred=True, secrets=newer)
    assert dict(answer.deferred_mount.secrets) == newer
    await bench.down(volume.volume_id, target)
    files = [path for path in bench.root.rglob("*") if path.is_file()]
    assert not any(SECRET["passphrase"].encode() in path.read_bytes() for path in files)


async def test_encrypted_volume_without_a_passphrase_is_not_published(bench: Bench) -> None:
    volume, target = await bench.create(parameters=LUKS), bench.target("pod-a")
    await bench.stage(volume.volume_id, secrets=SECRET)
    bench.restart()
    with raised("PassphraseMissing", match="delete the pod"):
        await bench.publish(volume.volume_id, target, deferred=True)
    await bench.publish(volume.volume_id, target, deferred=True, secrets=SECRET)


async def test_encrypted_volume_is_published_on_no_host(bench: Bench) -> None:
    volume, target = await bench.create(parameters=LUKS), bench.target("pod-a")
    with raised("EncryptedOnHost"):
        await bench.stage(volume.volume_id, block())
    await bench.stage(volume.volume_id)
    with raised("EncryptedOnHost"):
        await bench.publish(volume.volume_id, target)
    answer = await bench.publish(volume.volume_id, target, deferred=True, secrets=SECRET)
    assert answer.deferred_mount.HasField("format")


async def test_copy_of_volume_that_guest_had_is_formatted_by_nobody(bench: Bench) -> None:
    volume, target = await bench.create(parameters=GUEST), bench.target("pod-a")
    await bench.up(volume.volume_id, target, deferred=True)
    await bench.down(volume.volume_id, target)
    for name, parameters in (("guest", GUEST), ("host", None)):
        if parameters is None:
            with raised("SourceProtectionDiffers"):
                await bench.create(name, parameters=parameters, volume=volume.volume_id)
            continue
        copy = await bench.create(name, parameters=parameters, volume=volume.volume_id)
        await bench.stage(copy.volume_id)
        answer = await bench.publish(copy.volume_id, target, deferred=True)
        assert not answer.deferred_mount.HasField("format")
        await bench.down(copy.volume_id, target)


@pytest.mark.parametrize("deferred", [False, True])
async def test_full_run_directory_stops_no_unpublish_and_no_unstage(
    bench: Bench, *, deferred: bool
) -> None:
    run = bench.root / "run"
    small = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(run)]
    await asyncio.to_thread(subprocess.run, small, check=True)
    try:
        bench.restart()
        volume_id, target = await bench.published(deferred=deferred)
        other = bench.target("pod-b")
        fill = ["dd", "if=/dev/zero", f"of={run}/ballast", "bs=1", "count=64K"]
        assert (await asyncio.to_thread(subprocess.run, fill, capture_output=True)).returncode
        with pytest.raises(errors.NotReady if deferred else errors.Exhausted):
            await bench.publish(volume_id, other, deferred=deferred)
        assert not is_there(other)
        for _ in range(2):
            await bench.unpublish(volume_id, target)
        bench.restart()
        assert bench.driver.stores.node_state.of(volumes.VolumeId(volume_id)).publishes == ()
        await bench.unstage(volume_id)
    finally:
        mount_api.unmount(str(run))
