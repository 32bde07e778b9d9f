"""Growth, usage and freezing of each filesystem."""

import os
from pathlib import Path

import pytest

from crust.core import errors
from crust.core.volumes import UsageUnit
from crust.host.block import loop
from crust.host.filesystems import fsfreeze, growth, mkfs, usage
from crust.host.mounts import mount_api
from crust.host.process import capabilities
from tests.integration.host.conftest import MIB, Attach

pytestmark = pytest.mark.root


async def test_mounted_xfs_grows_to_its_device(attach: Attach, mountpoint: str) -> None:
    device = attach(300 * MIB)
    await mkfs.make(device.path, "xfs")
    os.truncate(device.backing, 600 * MIB)
    loop.refresh_size(device)
    mount_api.mount_device(device.path, mountpoint, "xfs")
    before = usage.measure(mountpoint).usage[0].total
    await growth.grow_mounted(mountpoint, "xfs")
    await growth.grow_mounted(mountpoint, "xfs")
    assert usage.measure(mountpoint).usage[0].total > before + 250 * MIB


async def test_grow_mounted_ext4_needs_cap_sys_resource(attach: Attach, mountpoint: str) -> None:
    device = attach(64 * MIB)
    await mkfs.make(device.path, "ext4")
    mount_api.mount_device(device.path, mountpoint, "ext4")
    await growth.grow_mounted(mountpoint, "ext4")  # it fills its device: needs no capability
    os.truncate(device.backing, 128 * MIB)
    loop.refresh_size(device)
    assert bool(growth.obstacle("ext4")) != capabilities.has_cap_sys_resource()
    if not growth.obstacle("ext4"):
        await growth.grow_mounted(mountpoint, "ext4")
        assert usage.measure(mountpoint).usage[0].total > 100 * MIB
        return
    with pytest.raises(growth.MissingCapability, match="CAP_SYS_RESOURCE"):
        await growth.grow_mounted(mountpoint, "ext4")


async def test_grow_mounted_without_mount_is_refused(mountpoint: str) -> None:
    with pytest.raises(errors.NotReady, match="no ext4 is mounted"):
        await growth.grow_mounted(mountpoint, "ext4")


async def test_measure_counts_bytes_and_inodes(attach: Attach, mountpoint: str) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    mount_api.mount_device(device.path, mountpoint, "ext4")
    before = {line.unit: line for line in usage.measure(mountpoint).usage}
    (Path(mountpoint) / "file").write_bytes(b"x" * MIB)
    os.sync()
    after = {line.unit: line for line in usage.measure(mountpoint).usage}
    assert after[UsageUnit.BYTES].used - before[UsageUnit.BYTES].used == MIB
    assert after[UsageUnit.INODES].used - before[UsageUnit.INODES].used == 1
    for line in after.values():
        assert 0 < line.available <= line.total - line.used


async def test_second_freeze_is_refused_and_no_thaw(attach: Attach, mountpoint: str) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    mount_api.mount_device(device.path, mountpoint, "ext4")
    freeze = fsfreeze.Freeze(mountpoint)
    try:
        with pytest.raises(errors.NotReady, match="frozen already"):
            fsfreeze.Freeze(mountpoint)
    finally:
        freeze.thaw()
    fsfreeze.thaw(mountpoint)
    (Path(mountpoint) / "file").touch()
