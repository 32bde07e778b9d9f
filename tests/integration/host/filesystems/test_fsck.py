"""fsck of real filesystems by the real programs."""

import os

import pytest

from crust.core import errors
from crust.host.block import devices, holders
from crust.host.filesystems import fsck, mkfs, superblocks, supported
from tests.integration.host.conftest import Attach, run
from tests.support.raised import raised

pytestmark = pytest.mark.root


async def test_check_of_ext4_not_unmounted_leaves_it_clean(attach: Attach) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    run("debugfs", "-w", "-R", "ssv state 0", device.path)  # "not unmounted cleanly"
    assert not superblocks.read_ext4(device.path).clean
    await fsck.check(device.path, "ext4")
    assert superblocks.read_ext4(device.path).clean


async def test_check_of_damaged_ext4_raises_filesystem_needs_repair(attach: Attach) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    run("debugfs", "-w", "-R", "clri <2>", device.path)
    run("debugfs", "-w", "-R", "ssv state 2", device.path)  # "errors detected"
    with raised("FilesystemNeedsRepair") as caught:
        await fsck.check(device.path, "ext4")
    assert "Root inode is not a directory" in caught.value.why


async def test_check_of_an_unknown_ext4_feature_fails(attach: Attach) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    run("debugfs", "-w", "-R", "ssv state 0", device.path)
    run("debugfs", "-w", "-R", "feature FEATURE_I31", device.path)
    with raised("FilesystemCheckFailed", match="unsupported feature"):
        await fsck.check(device.path, "ext4")


async def test_check_of_exclusively_held_device_raises_device_in_use(attach: Attach) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    run("debugfs", "-w", "-R", "ssv state 0", device.path)
    hold = devices.open_exclusive(device.path)
    try:
        with pytest.raises(holders.DeviceInUse):
            await fsck.check(device.path, "ext4")
    finally:
        os.close(hold)


async def test_check_of_another_content_is_corrupt(attach: Attach) -> None:
    device = attach()
    for fs_type in supported.SUPPORTED:
        with pytest.raises(errors.Corrupt):
            await fsck.check(device.path, fs_type)
