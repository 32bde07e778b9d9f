"""Filesystems that grow while they are mounted, and by a mount at no path."""

import os

import pytest

from crust.blockdriver.host import usage
from crust.core import errors
from crust.host.block import devices, loop
from crust.host.filesystems import mkfs, superblocks
from crust.host.mounts import growth, mount_api
from tests.integration.host.conftest import MIB, Attach

pytestmark = pytest.mark.root


async def test_grow_mounted_ext4_needs_cap_sys_resource(attach: Attach, mountpoint: str) -> None:
    device = attach(64 * MIB)
    await mkfs.make(device.path, "ext4")
    mount_api.mount_device(device.path, mountpoint, "ext4")
    growth.grow_mounted(mountpoint, "ext4")  # it fills its device: needs no capability
    os.truncate(device.backing, 128 * MIB)
    loop.refresh_size(device)
    assert bool(growth.obstacle("ext4")) != growth.has_cap_sys_resource()
    if not growth.obstacle("ext4"):
        growth.grow_mounted(mountpoint, "ext4")
        assert usage.measure(mountpoint).usage[0].total > 100 * MIB
        return
    with pytest.raises(growth.MissingCapability, match="CAP_SYS_RESOURCE"):
        growth.grow_mounted(mountpoint, "ext4")


async def test_grow_mounted_without_mount_is_refused(mountpoint: str) -> None:
    with pytest.raises(errors.NotReady, match="no ext4 is mounted"):
        growth.grow_mounted(mountpoint, "ext4")


@pytest.mark.parametrize("fs_type", ["ext4", "xfs", "btrfs"])
async def test_grow_unmounted_fills_the_device_or_mounts_nothing(
    attach: Attach, fs_type: str
) -> None:
    device = attach(304 * MIB)
    await mkfs.make(device.path, fs_type)
    os.truncate(device.backing, 400 * MIB)
    loop.refresh_size(device)
    if growth.obstacle(fs_type):
        with pytest.raises(growth.MissingCapability, match="CAP_SYS_RESOURCE"):
            growth.grow_unmounted(device.path, fs_type)
    else:
        growth.grow_unmounted(device.path, fs_type)
        assert superblocks.read(device.path, fs_type).size_bytes > 396 * MIB
    os.close(devices.open_exclusive(device.path))


async def test_grow_unmounted_beside_a_clone_of_same_uuid(attach: Attach, mountpoint: str) -> None:
    source, clone = attach(304 * MIB), attach(400 * MIB)
    await mkfs.make(source.path, "xfs")
    with open(source.path, "rb") as content, open(clone.path, "r+b") as copy:
        copy.write(content.read())
    mount_api.mount_device(source.path, mountpoint, "xfs")
    growth.grow_unmounted(clone.path, "xfs")
    assert superblocks.read(clone.path, "xfs").size_bytes > 396 * MIB
