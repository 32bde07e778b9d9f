"""The lifecycle of a volume on real loop devices and mounts."""

import os
import subprocess
from pathlib import Path

import pytest

from crust.blockdriver.engines import protocol
from crust.blockdriver.node import node_unpublish
from crust.core import volumes
from crust.host.block import loop
from crust.host.filesystems import superblocks
from crust.host.mounts import mountinfo
from crust.rpc.messages import csi
from tests.support.co import publish_request
from tests.support.drivers.block_driver import MIB, Bench, caller, is_there, mount
from tests.support.raised import raised
from tests.support.records import pool_layout

pytestmark = pytest.mark.root


def leave_errors(image: Path) -> None:
    """Set EXT2_ERROR_FS in the superblock, as a kernel does that met an error."""
    argv = ["debugfs", "-w", "-R", "set_super_value state 2", str(image)]
    subprocess.run(argv, check=True, capture_output=True)
    assert not superblocks.read_ext4(str(image)).clean


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
    assert len(loop.find(image)) == 1
    await bench.unstage(volume.volume_id, path=first)
    await bench.publish(volume.volume_id, bench.target("pod-a"), path=second)
    await bench.unpublish(volume.volume_id, bench.target("pod-a"))
    await bench.unstage(volume.volume_id, path=second)
    assert loop.find(image) == ()


async def test_stats_of_a_deferred_volume_are_not_the_drivers(bench: Bench) -> None:
    volume_id, target = await bench.published(deferred=True)
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


async def test_publish_checks_a_filesystem_not_unmounted_cleanly(bench: Bench) -> None:
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
