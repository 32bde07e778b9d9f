"""Filesystems that grow while they are mounted."""

import os

import pytest

from crust.blockdriver.host import growth, usage
from crust.core import errors
from crust.host.block import loop
from crust.host.filesystems import mkfs
from crust.host.mounts import mount_api
from tests.integration.host.conftest import MIB, Attach

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


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
