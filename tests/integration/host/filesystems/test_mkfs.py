"""Filesystems made, probed, checked and grown by the real programs and the real kernel."""

import os
from pathlib import Path

import pytest

from crust import errors
from crust.host.block import devices, loop, signatures
from crust.host.filesystems import fsck, fsfreeze, growth, mkfs, superblocks, supported, usage
from crust.host.mounts import mount_api
from crust.host.process import capabilities, commands
from crust.volumes import UsageUnit
from tests.integration.host.conftest import MIB, Attach, partition_table, read, run, write

pytestmark = pytest.mark.root

SIZES = {"ext4": 64 * MIB, "xfs": 300 * MIB, "btrfs": 128 * MIB}


@pytest.mark.parametrize("fs_type", supported.SUPPORTED)
@pytest.mark.parametrize("zeroed", [False, True])
async def test_made_filesystem_is_probed_checked_and_mounted(
    attach: Attach, mountpoint: str, fs_type: str, *, zeroed: bool
) -> None:
    device = attach(SIZES[fs_type])
    assert signatures.probe(device.path) == signatures.Blank()
    await mkfs.make(device.path, fs_type, zeroed=zeroed)
    found = signatures.probe(device.path)
    assert isinstance(found, signatures.Filesystem)
    assert (found.type, len(found.uuid)) == (fs_type, 36)
    assert not await fsck.check(device.path, fs_type)
    assert not growth.needs_growth(device.path, fs_type)
    assert not devices.is_blank(device.path)
    mount_api.mount_device(device.path, mountpoint, fs_type)
    (Path(mountpoint) / "file").write_bytes(b"x")


async def test_small_ext4_has_large_blocks(attach: Attach) -> None:
    device = attach(mkfs.minimum_bytes("ext4"))
    await mkfs.make(device.path, "ext4")
    assert superblocks.read_ext4(device.path).block_size_bytes == 4096


@pytest.mark.parametrize("fs_type", supported.SUPPORTED)
@pytest.mark.parametrize("there", ["ext4", "xfs", "btrfs"])
async def test_what_is_there_is_never_formatted_over(
    attach: Attach, fs_type: str, there: str
) -> None:
    """mkfs.ext4 without a terminal asks nobody: it formats over another filesystem and exits with 0."""
    device = attach(300 * MIB)
    run(f"mkfs.{there}", "-q", device.path)
    before = signatures.probe(device.path)
    with pytest.raises(mkfs.DeviceNotBlank, match=there):
        await mkfs.make(device.path, fs_type)
    assert signatures.probe(device.path) == before


async def test_partition_table_is_something(attach: Attach) -> None:
    device = attach()
    write(device.path, 0, partition_table(sectors=1000))
    assert signatures.probe(device.path) == signatures.Other("partition table dos")
    with pytest.raises(mkfs.DeviceNotBlank, match="partition table dos"):
        await mkfs.make(device.path, "ext4")


def test_encrypted_volume_is_something_that_is_no_filesystem(attach: Attach) -> None:
    device = attach()
    write(device.path, 0, b"LUKS\xba\xbe\x00\x01" + bytes(600))
    assert signatures.probe(device.path) == signatures.Other("crypto crypto_LUKS")


async def test_clone_of_a_mounted_xfs_is_refused_with_the_remedy(
    attach: Attach, mountpoint: str, tmp_path: Path
) -> None:
    device, clone = attach(300 * MIB), attach(300 * MIB, "clone.img")
    await mkfs.make(device.path, "xfs")
    run("cp", "--sparse=always", device.path, clone.path)
    mount_api.mount_device(device.path, mountpoint, "xfs")
    second = str(tmp_path)
    with pytest.raises(mount_api.MountFailed, match="nouuid"):
        mount_api.mount_device(clone.path, second, "xfs")
    mount_api.mount_device(clone.path, second, "xfs", ["nouuid"])
    mount_api.unmount(second)


def test_swap_is_something_that_is_no_filesystem(attach: Attach) -> None:
    device = attach()
    run("mkswap", device.path)
    assert signatures.probe(device.path) == signatures.Other("other swap")


async def test_two_signatures_are_a_doubt_and_a_doubt_is_an_error(attach: Attach) -> None:
    device, other = attach(300 * MIB), attach(300 * MIB, "other.img")
    run("mkfs.xfs", "-q", device.path)
    run("mkfs.ext4", "-q", other.path)
    write(device.path, 1024, read(other.path, 1024, 1024))
    with pytest.raises(signatures.AmbiguousSignature):
        signatures.probe(device.path)
    with pytest.raises(signatures.AmbiguousSignature):
        await mkfs.make(device.path, "ext4")


def test_device_that_was_detached_is_not_blank_but_an_error(attach: Attach) -> None:
    device = attach()
    loop.detach(device)
    with pytest.raises(errors.RuntimeFailed, match="no size"):
        signatures.probe(device.path)
    with pytest.raises(errors.NotReady, match="no size"):
        devices.is_blank(device.path)


async def test_device_that_is_too_small_is_refused_with_both_sizes(attach: Attach) -> None:
    device = attach(299 * MIB)
    with pytest.raises(mkfs.DeviceTooSmallForFilesystem) as caught:
        await mkfs.make(device.path, "xfs")
    assert (caught.value.size_bytes, caught.value.minimum_bytes) == (299 * MIB, 300 * MIB)
    assert devices.is_blank(device.path)


async def test_fenced_device_is_not_formatted(attach: Attach) -> None:
    device = attach()
    fence = devices.open_exclusive(device.path)
    try:
        with pytest.raises(devices.DeviceInUse):
            await mkfs.make(device.path, "ext4")
    finally:
        os.close(fence)
    assert devices.is_blank(device.path)


async def test_unknown_filesystem_is_an_invalid_request(attach: Attach) -> None:
    device = attach()
    with pytest.raises(supported.UnknownFilesystem, match="ext4, xfs"):
        await mkfs.make(device.path, "ntfs")
    assert not supported.is_supported("ntfs")


async def test_options_that_mkfs_refuses_are_told_in_its_words(attach: Attach) -> None:
    device = attach()
    with pytest.raises(commands.CommandFailed) as caught:
        await mkfs.make(device.path, "ext4", extra_options=("-O", "nosuchfeature"))
    assert "nosuchfeature" in str(caught.value)


async def test_ext4_that_was_not_unmounted_is_checked_and_clean_afterwards(attach: Attach) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    run("debugfs", "-w", "-R", "ssv state 0", device.path)  # "not unmounted cleanly"
    assert not superblocks.read_ext4(device.path).clean
    await fsck.check(device.path, "ext4")
    assert superblocks.read_ext4(device.path).clean


async def test_damaged_ext4_is_corrupt_and_not_touched_further(attach: Attach) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    run("debugfs", "-w", "-R", "clri <2>", device.path)
    run("debugfs", "-w", "-R", "ssv state 2", device.path)  # "errors detected"
    with pytest.raises(fsck.FilesystemNeedsRepair) as caught:
        await fsck.check(device.path, "ext4")
    assert "Root inode is not a directory" in caught.value.why


async def test_an_ext4_that_its_check_does_not_understand_is_not_mounted(attach: Attach) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    run("debugfs", "-w", "-R", "ssv state 0", device.path)
    run("debugfs", "-w", "-R", "feature FEATURE_I31", device.path)
    with pytest.raises(fsck.FilesystemCheckFailed, match="unsupported feature"):
        await fsck.check(device.path, "ext4")


async def test_check_of_a_fenced_device_says_that_it_is_in_use(attach: Attach) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    run("debugfs", "-w", "-R", "ssv state 0", device.path)
    fence = devices.open_exclusive(device.path)
    try:
        with pytest.raises(devices.DeviceInUse):
            await fsck.check(device.path, "ext4")
    finally:
        os.close(fence)


async def test_check_of_something_else_is_corrupt(attach: Attach) -> None:
    device = attach()
    for fs_type in supported.SUPPORTED:
        with pytest.raises(errors.Corrupt):
            await fsck.check(device.path, fs_type)


async def test_ext4_grows_unmounted_also_after_it_was_mounted(
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


async def test_an_ext4_that_is_mounted_read_only_is_left_alone_by_its_check_and_its_growth(
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


async def test_xfs_grows_mounted_only(attach: Attach, mountpoint: str) -> None:
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


async def test_mounted_ext4_grows_where_the_capability_is_and_says_so_where_it_is_not(
    attach: Attach, mountpoint: str
) -> None:
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


async def test_growing_what_is_not_mounted_is_refused(mountpoint: str) -> None:
    with pytest.raises(errors.NotReady, match="no ext4 is mounted"):
        await growth.grow_mounted(mountpoint, "ext4")


async def test_usage_adds_up(attach: Attach, mountpoint: str) -> None:
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


async def test_frozen_filesystem_is_told_and_thawing_twice_is_fine(
    attach: Attach, mountpoint: str
) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    mount_api.mount_device(device.path, mountpoint, "ext4")
    fsfreeze.freeze(mountpoint)
    try:
        with pytest.raises(errors.NotReady, match="frozen already"):
            fsfreeze.freeze(mountpoint)
    finally:
        fsfreeze.thaw(mountpoint)
    fsfreeze.thaw(mountpoint)
    (Path(mountpoint) / "file").touch()
