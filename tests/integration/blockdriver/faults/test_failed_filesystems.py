"""A filesystem that the kernel shut down after a device error: reported, and the pod can end."""

import fcntl
import os
import struct
import subprocess

import pytest

from crust.host.mounts import mountinfo
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, Mode, caller, is_there, mount

pytestmark = pytest.mark.root

_GOING_DOWN = 0x8004587D  # XFS_IOC_GOINGDOWN and EXT4_IOC_SHUTDOWN
_WITHOUT_LOG = 2
SIZES = [("ext4", 64 * MIB), ("xfs", 320 * MIB)]


def give_up(mountpoint: str) -> None:
    """Shut the filesystem down, as the kernel does when its log cannot be written."""
    fd = os.open(mountpoint, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _GOING_DOWN, struct.pack("I", _WITHOUT_LOG))
    finally:
        os.close(fd)


def make_read_only(mountpoint: str) -> None:
    """The filesystem and not its mount, as the kernel does after an error."""
    for options in ("remount,ro", "remount,bind,rw"):
        subprocess.run(["mount", "-o", options, mountpoint], check=True)


async def published(bench: Bench, fs_type: str, size: int) -> tuple[str, str]:
    volume = await bench.create(capability=mount(fs_type), size=size)
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id, mount(fs_type))
    await bench.publish(volume.volume_id, target, mount(fs_type))
    return volume.volume_id, target


@pytest.mark.parametrize(("fs_type", "size"), SIZES)
@pytest.mark.parametrize("restarted", [False, True])
async def test_shut_down_filesystem_is_unhealthy_and_can_be_republished(
    bench: Bench, fs_type: str, size: int, *, restarted: bool
) -> None:
    volume_id, target = await published(bench, fs_type, size)
    give_up(target)
    if restarted:
        bench.restart()
    stats = await bench.stats(volume_id, target)
    assert stats.usage[0].total > size / 2
    assert stats.condition is not None
    assert stats.condition.abnormal
    await bench.publish(volume_id, target, mount(fs_type))
    await bench.unpublish(volume_id, target)
    assert mountinfo.below(str(bench.root)) == ()
    assert not is_there(target)
    await bench.unstage(volume_id)
    await bench.stage(volume_id, mount(fs_type))
    await bench.publish(volume_id, target, mount(fs_type))
    condition = (await bench.stats(volume_id, target)).condition
    assert condition is not None
    assert not condition.abnormal


@pytest.mark.parametrize(("fs_type", "size"), SIZES)
async def test_shut_down_filesystem_in_csi_1_13_is_inaccessible(
    bench: Bench, fs_type: str, size: int
) -> None:
    bench.profile = "1.13"
    bench.restart()
    volume_id, target = await published(bench, fs_type, size)
    give_up(target)
    request = csi_pb2.NodeGetVolumeHealthRequest(volume_id=volume_id, volume_publish_path=target)
    answer = await bench.driver.node.NodeGetVolumeHealth(request, caller())
    reported = answer.volume_health.health_statuses
    assert [each.status for each in reported] == [csi_pb2.INACCESSIBLE]


async def test_filesystem_made_read_only_by_the_kernel_is_unhealthy(bench: Bench) -> None:
    volume_id, target = await published(bench, "ext4", 64 * MIB)
    make_read_only(target)
    condition = (await bench.stats(volume_id, target)).condition
    assert condition is not None
    assert "read-only" in condition.message
    await bench.unpublish(volume_id, target)
    reader = mount(mode=Mode.SINGLE_NODE_READER_ONLY)
    await bench.publish(volume_id, target, reader, readonly=True)
    bench.lose_publishes()
    bench.restart()
    condition = (await bench.stats(volume_id, target)).condition
    assert condition is not None
    assert not condition.abnormal
