"""The lifecycle of a volume on real loop devices and mounts."""

import os
import subprocess
from pathlib import Path

import pytest

from crust.blockdriver.engines import protocol
from crust.blockdriver.node import node_expand, node_unpublish
from crust.core import volumes
from crust.host.block import devices, loop_devices
from crust.host.filesystems import superblocks
from crust.host.mounts import mountinfo
from crust.rpc.messages import csi
from tests.support.co import publish_request
from tests.support.drivers.block_driver import MIB, Bench, block, caller, is_there, mount, write_raw
from tests.support.raised import raised
from tests.support.records import pool_layout

pytestmark = pytest.mark.root


def leave_errors(image: Path) -> None:
    """Set EXT2_ERROR_FS in the superblock, as a kernel does that met an error."""
    argv = ["debugfs", "-w", "-R", "set_super_value state 2", str(image)]
    subprocess.run(argv, check=True, capture_output=True)
    assert not superblocks.read_ext4(str(image)).clean


@pytest.mark.parametrize(("fs_type", "size"), [("ext4", 64 * MIB), ("xfs", 320 * MIB)])
async def test_filesystem_volume_lifecycle_succeeds(bench: Bench, fs_type: str, size: int) -> None:
    volume_id = await bench.staged(capability=mount(fs_type), size=size)
    target = bench.target("pod-a")
    assert mountinfo.below(str(bench.root)) == ()
    await bench.publish(volume_id, target, mount(fs_type))
    (Path(target) / "kept").write_text("data")
    await bench.unpublish(volume_id, target)
    assert not is_there(target)
    await bench.unstage(volume_id)
    await bench.stage(volume_id, mount(fs_type))
    await bench.publish(volume_id, target, mount(fs_type))
    assert (Path(target) / "kept").read_text() == "data"
    await bench.unpublish(volume_id, target)
    await bench.unstage(volume_id)
    await bench.delete(volume_id)
    assert pool_layout.files(bench.root / "state") == set()


async def test_lifecycle_with_every_step_repeated_succeeds(bench: Bench) -> None:
    first, second = await bench.create(), await bench.create()
    assert first == second
    target = bench.target("pod-a")
    for _ in range(2):
        await bench.stage(first.volume_id)
    for _ in range(2):
        await bench.publish(first.volume_id, target)
    assert len(mountinfo.below(str(bench.root))) == 1
    for _ in range(2):
        await bench.unpublish(first.volume_id, target)
    for _ in range(2):
        await bench.unstage(first.volume_id)
    for _ in range(2):
        await bench.delete(first.volume_id)


async def test_lifecycle_with_every_step_repeated_after_a_restart_succeeds(bench: Bench) -> None:
    volume_id, target = await bench.staged(), bench.target("pod-a")
    bench.restart()
    await bench.stage(volume_id)
    await bench.publish(volume_id, target)
    bench.restart()
    await bench.publish(volume_id, target)
    assert len(mountinfo.below(str(bench.root))) == 1
    bench.restart()
    with pytest.raises(node_unpublish.StillPublished, match="pod-a"):
        await bench.unstage(volume_id)
    await bench.unpublish(volume_id, target)
    bench.restart()
    await bench.unstage(volume_id)
    await bench.delete(volume_id)


async def test_publish_to_two_targets_keeps_the_read_only_one_read_only(
    bench: Bench,
) -> None:
    volume = await bench.create()
    writer, reader = bench.target("pod-a"), bench.target("pod-b")
    await bench.stage(volume.volume_id)
    await bench.publish(volume.volume_id, reader, readonly=True)
    await bench.publish(volume.volume_id, writer)
    (Path(writer) / "file").write_text("seen")
    assert (Path(reader) / "file").read_text() == "seen"
    with pytest.raises(OSError, match="Read-only"):
        (Path(reader) / "other").write_text("refused")


async def test_publish_of_a_raw_volume_gives_the_device(bench: Bench) -> None:
    volume_id, target = await bench.published(capability=block())
    assert devices.size_bytes(target) == 64 * MIB
    write_raw(target)
    stats = await bench.stats(volume_id, target)
    assert stats.usage == (volumes.VolumeUsage(volumes.UsageUnit.BYTES, 64 * MIB, 0, 0),)
    await bench.unpublish(volume_id, target)
    await bench.unstage(volume_id)
    with raised("NoFilesystemOnDevice"):
        await bench.stage(volume_id, mount())
    await bench.unstage(volume_id)
    await bench.delete(volume_id)


async def test_publish_of_a_raw_volume_read_only_refuses_writes(bench: Bench) -> None:
    volume_id, target = await bench.published(capability=block(), readonly=True)
    with pytest.raises(PermissionError):
        write_raw(target)
    with raised("PublishedElsewhere"):
        await bench.publish(volume_id, bench.target("pod-b"), block())
    await bench.unpublish(volume_id, target)
    await bench.publish(volume_id, target, block())
    write_raw(target)


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
    image = str(pool_layout.image(bench.root / "state", volume.volume_id))
    assert len(loop_devices.find(image)) == 1
    await bench.unstage(volume.volume_id, path=first)
    await bench.publish(volume.volume_id, bench.target("pod-a"), path=second)
    await bench.unpublish(volume.volume_id, bench.target("pod-a"))
    await bench.unstage(volume.volume_id, path=second)
    assert loop_devices.find(image) == ()


async def test_stats_are_those_of_the_mounted_filesystem(bench: Bench) -> None:
    volume_id, target = await bench.staged(), bench.target("pod-a")
    with pytest.raises(node_expand.NotPublishedAtPath):
        await bench.stats(volume_id, target)
    await bench.publish(volume_id, target)
    (Path(target) / "file").write_bytes(os.urandom(8 * MIB))
    os.sync()
    stats = await bench.stats(volume_id, target)
    bytes_, inodes = stats.usage
    assert (bytes_.unit, inodes.unit) == (volumes.UsageUnit.BYTES, volumes.UsageUnit.INODES)
    assert bytes_.used >= 8 * MIB
    assert 0 < bytes_.total < 64 * MIB
    assert stats.condition is not None
    assert not stats.condition.abnormal
    await bench.unpublish(volume_id, target)
    await bench.publish(volume_id, target, deferred=True)
    with raised("VolumeMountedInGuest"):
        await bench.stats(volume_id, target)


async def test_truncated_image_is_an_abnormal_condition(bench: Bench) -> None:
    volume_id, target = await bench.published()
    image = pool_layout.image(bench.root / "state", volume_id)
    os.rename(image, image.with_suffix(".moved"))
    stats = await bench.stats(volume_id, target)
    assert stats.condition is not None
    assert stats.condition.abnormal
    assert "does not exist" in stats.condition.message
    os.rename(image.with_suffix(".moved"), image)


async def test_publish_with_fs_group_changes_every_file_and_follows_no_link(bench: Bench) -> None:
    volume = await bench.create()
    target = bench.target("pod-a")
    outside = bench.root / "outside"
    outside.write_text("not yours")
    group_before = outside.stat().st_gid
    await bench.stage(volume.volume_id)
    await bench.publish(volume.volume_id, target)
    (Path(target) / "deep" / "er").mkdir(parents=True)
    (Path(target) / "deep" / "er" / "file").write_text("x")
    (Path(target) / "link").symlink_to(outside)
    await bench.unpublish(volume.volume_id, target)
    await bench.publish(volume.volume_id, target, mount(group=volumes.GroupChange(2345)))
    for path in (Path(target), Path(target) / "deep" / "er", Path(target) / "deep" / "er" / "file"):
        assert path.stat().st_gid == 2345
    assert os.stat(target).st_mode & 0o2770 == 0o2770
    assert (Path(target) / "link").lstat().st_gid == 2345
    assert outside.stat().st_gid == group_before


async def test_publish_with_group_0_is_refused_only_if_deferred(
    bench: Bench,
) -> None:
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
    request = publish_request(
        volume_id,
        target,
        csi.capability_to_wire(root),
        staging=bench.staging(volume_id),
    )
    with raised("RootGroupNotDeferrable"):
        await bench.driver.node.NodePublishVolume(request, caller())


async def test_unpublish_without_record_or_node_state_succeeds(bench: Bench) -> None:
    volume = await bench.create()
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id)
    await bench.publish(volume.volume_id, target)
    for path in bench.root.glob("run/*/*/*"):
        path.unlink()
    bench.restart()
    await bench.unpublish("some-unknown-volume", bench.target("pod-b"))
    await bench.unpublish(volume.volume_id, target)
    assert mountinfo.at(target) is None
    assert not is_there(target)


async def test_publish_checks_a_filesystem_not_unmounted_cleanly(
    bench: Bench,
) -> None:
    volume_id, target = await bench.staged(), bench.target("pod-a")
    await bench.unstage(volume_id)
    image = pool_layout.image(bench.root / "state", volume_id)
    leave_errors(image)
    await bench.stage(volume_id)
    assert superblocks.read_ext4(str(image)).clean
    await bench.publish(volume_id, target)


async def test_stage_formats_with_the_storage_class_options(bench: Bench) -> None:
    sent = {"crust.dev/ext4-bytes-per-inode": "65536", "crust.dev/ext4-reserved-percent": "5"}
    target = bench.target("pod-a")
    volume_id = (await bench.create(size=64 * MIB, parameters=sent)).volume_id
    await bench.stage(volume_id)
    await bench.publish(volume_id, target)
    found = os.statvfs(target)
    assert found.f_files == 64 * MIB // 65536
    assert found.f_bfree - found.f_bavail >= found.f_blocks // 25
