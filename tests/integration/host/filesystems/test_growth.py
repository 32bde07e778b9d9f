"""Growth of real filesystems."""

import os
from pathlib import Path

import pytest

from crust import errors
from crust.host.block import devices, loop
from crust.host.filesystems import growth, mkfs, usage
from crust.host.mounts import mount_api
from crust.host.process import capabilities
from tests.integration.host.conftest import MIB, Attach

pytestmark = pytest.mark.root


async def test_grow_unmounted_ext4_after_a_mount_grows_and_keeps_data(
    attach: Attach, mountpoint: str
) -> None:
    """resize2fs wants a full check of a filesystem that was mounted since its last one."""
    device = attach(64 * MIB)
    await mkfs.make(device.path, "ext4")
    mount_api.mount_device(device.path, mountpoint, "ext4")
    (Path(mountpoint) / "file").write_bytes(b"kept")
    mount_api.unmount(mountpoint)
    os.truncate(device.backing, 128 * MIB)
    loop.refresh_size(device)
    assert growth.needs_growth(device.path, "ext4")
    await growth.grow_unmounted(device.path, "ext4")
    assert not growth.needs_growth(device.path, "ext4")
    mount_api.mount_device(device.path, mountpoint, "ext4")
    assert (Path(mountpoint) / "file").read_bytes() == b"kept"


async def test_grow_unmounted_ext4_mounted_read_only_is_refused(
    attach: Attach, mountpoint: str
) -> None:
    """e2fsck -f takes it for its own, although the filesystem below the mount is writable and in use."""
    device = attach(64 * MIB)
    await mkfs.make(device.path, "ext4")
    os.truncate(device.backing, 128 * MIB)
    loop.refresh_size(device)
    mount_api.mount_device(device.path, mountpoint, "ext4", readonly=True, beside_writers=True)
    with pytest.raises(devices.DeviceInUse, match=mountpoint):
        await growth.grow_unmounted(device.path, "ext4")


async def test_grow_xfs_works_only_while_mounted(attach: Attach, mountpoint: str) -> None:
    device = attach(300 * MIB)
    await mkfs.make(device.path, "xfs")
    os.truncate(device.backing, 600 * MIB)
    loop.refresh_size(device)
    assert growth.needs_growth(device.path, "xfs")
    with pytest.raises(growth.OnlyGrowsMounted):
        await growth.grow_unmounted(device.path, "xfs")
    mount_api.mount_device(device.path, mountpoint, "xfs")
    before = usage.measure(mountpoint).usage[0].total
    await growth.grow_mounted(mountpoint, "xfs")
    await growth.grow_mounted(mountpoint, "xfs")
    assert usage.measure(mountpoint).usage[0].total > before + 250 * MIB
    mount_api.unmount(mountpoint)
    assert not growth.needs_growth(device.path, "xfs")


async def test_grow_mounted_ext4_needs_cap_sys_resource(attach: Attach, mountpoint: str) -> None:
    device = attach(64 * MIB)
    await mkfs.make(device.path, "ext4")
    mount_api.mount_device(device.path, mountpoint, "ext4")
    await growth.grow_mounted(mountpoint, "ext4")  # it fills its device: needs no capability
    os.truncate(device.backing, 128 * MIB)
    loop.refresh_size(device)
    if capabilities.has_cap_sys_resource():
        await growth.grow_mounted(mountpoint, "ext4")
        assert usage.measure(mountpoint).usage[0].total > 100 * MIB
        return
    with pytest.raises(growth.MissingCapability, match="CAP_SYS_RESOURCE"):
        await growth.grow_mounted(mountpoint, "ext4")


async def test_grow_mounted_without_mount_is_refused(mountpoint: str) -> None:
    with pytest.raises(errors.NotReady, match="no ext4 is mounted"):
        await growth.grow_mounted(mountpoint, "ext4")
