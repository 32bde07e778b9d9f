"""The check of a filesystem on a real device, by the real programs."""

import os
from collections.abc import Sequence

import pytest

from crust.blockdriver.host import fsck
from crust.core import errors
from crust.host.block import devices, holders
from crust.host.filesystems import mkfs, superblocks
from tests.integration.host.conftest import Attach, run
from tests.support.raised import raised

pytestmark = pytest.mark.root


async def test_check_of_ext4_not_unmounted_leaves_it_clean(attach: Attach) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    run("debugfs", "-w", "-R", "ssv state 0", device.path)  # "not unmounted cleanly"
    assert not superblocks.read_ext4(device.path).clean
    hold = devices.open_exclusive(device.path)
    with pytest.raises(holders.DeviceInUse):
        await fsck.check_filesystem(device.path, "ext4")
    os.close(hold)
    await fsck.check_filesystem(device.path, "ext4")
    assert superblocks.read_ext4(device.path).clean


@pytest.mark.parametrize(
    ("changes", "name", "why"),
    [
        # "errors detected"
        (("clri <2>", "ssv state 2"), "FilesystemNeedsRepair", "Root inode is not a directory"),
        (("ssv state 0", "feature FEATURE_I31"), "FilesystemCheckFailed", "unsupported feature"),
    ],
)
async def test_check_of_ext4_that_is_not_repaired_unasked_is_corrupt(
    attach: Attach, changes: Sequence[str], name: str, why: str
) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    for change in changes:
        run("debugfs", "-w", "-R", change, device.path)
    with raised(name, errors.Corrupt, match=why):
        await fsck.check_filesystem(device.path, "ext4")


async def test_check_of_another_content_is_corrupt(attach: Attach) -> None:
    device = attach()
    for fs_type in mkfs.SUPPORTED:
        with pytest.raises(errors.Corrupt):
            await fsck.check_filesystem(device.path, fs_type)


async def test_complete_check_of_clean_ext4_finds_its_damage(attach: Attach) -> None:
    """An mkfs that outlived its driver may have been killed between two writes."""
    device = attach()
    await mkfs.make(device.path, "ext4")
    run("debugfs", "-w", "-R", "clri <2>", device.path)
    assert not await fsck.check_filesystem(device.path, "ext4")
    with raised("FilesystemNeedsRepair", errors.Corrupt, match="Root inode"):
        await fsck.check_filesystem(device.path, "ext4", completely=True)
