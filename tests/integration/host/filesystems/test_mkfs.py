"""mkfs on real devices, by the real programs."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from crust.host.block import devices, holders, signatures
from crust.host.filesystems import fsck, mkfs, superblocks, supported
from crust.host.mounts import mount_api
from crust.host.process import commands
from tests.integration.host.conftest import MIB, Attach, partition_table, run, write
from tests.support.raised import raised

pytestmark = pytest.mark.root

SIZES = {"ext4": 64 * MIB, "xfs": 300 * MIB, "btrfs": 128 * MIB}


@pytest.mark.parametrize("fs_type", supported.SUPPORTED)
async def test_make_on_blank_device_makes_a_clean_mountable_filesystem(
    attach: Attach, mountpoint: str, fs_type: str
) -> None:
    device = attach(SIZES[fs_type])
    assert signatures.probe(device.path) == signatures.Blank()
    await mkfs.make(device.path, fs_type)
    found = signatures.probe(device.path)
    assert isinstance(found, signatures.Filesystem)
    assert (found.type, len(found.uuid)) == (fs_type, 36)
    assert not await fsck.check(device.path, fs_type)
    assert not devices.is_blank(device.path)
    mount_api.mount_device(device.path, mountpoint, fs_type)
    (Path(mountpoint) / "file").write_bytes(b"x")


async def test_make_small_ext4_uses_4_kib_blocks(attach: Attach) -> None:
    device = attach(mkfs.minimum_bytes("ext4"))
    await mkfs.make(device.path, "ext4")
    assert superblocks.read_ext4(device.path).block_size_bytes == 4096


async def test_make_ext4_has_the_features_that_old_kernels_mount(attach: Attach) -> None:
    """A mke2fs of today would add orphan_file and metadata_csum_seed, which Linux 5.15 does not mount."""
    device = attach(SIZES["ext4"])
    await mkfs.make(device.path, "ext4")
    listed = (await commands.run(["dumpe2fs", "-h", device.path], timeout_s=60)).stdout.decode()
    line = next(each for each in listed.splitlines() if each.startswith("Filesystem features:"))
    assert set(line.partition(":")[2].split()) == {
        *("has_journal", "ext_attr", "resize_inode", "dir_index", "filetype", "extent", "64bit"),
        *("flex_bg", "sparse_super", "large_file", "huge_file", "dir_nlink", "extra_isize"),
        "metadata_csum",
    }


@pytest.mark.parametrize("fs_type", supported.SUPPORTED)
@pytest.mark.parametrize("there", ["ext4", "xfs", "btrfs"])
async def test_make_on_existing_filesystem_is_refused(
    attach: Attach, fs_type: str, there: str
) -> None:
    """mkfs.ext4 without a terminal does not ask: it formats over another filesystem and exits with 0."""
    device = attach(300 * MIB)
    run(f"mkfs.{there}", "-q", device.path)
    before = signatures.probe(device.path)
    with raised("DeviceNotBlank", match=there):
        await mkfs.make(device.path, fs_type)
    assert signatures.probe(device.path) == before


async def test_make_asks_the_given_source_what_is_there_while_it_holds_the_device(
    attach: Attach,
) -> None:
    device = attach()
    run("mkfs.ext4", "-q", device.path)
    before = signatures.probe(device.path)
    held = []

    def probe(path: str) -> signatures.Signature:
        held.append(holders.is_exclusively_held(path))
        return signatures.probe_untrusted(path)

    with raised("DeviceNotBlank", match="ext4"):
        await mkfs.make(device.path, "ext4", probe=probe)
    assert held == [True]
    assert signatures.probe(device.path) == before


async def test_make_on_partition_table_is_refused(attach: Attach) -> None:
    device = attach()
    write(device.path, 0, partition_table(sectors=1000))
    assert signatures.probe(device.path) == signatures.Other("partition table dos")
    with raised("DeviceNotBlank", match="partition table dos"):
        await mkfs.make(device.path, "ext4")


async def test_make_on_too_small_device_is_refused_with_both_sizes(attach: Attach) -> None:
    device = attach(299 * MIB)
    with raised("DeviceTooSmallForFilesystem") as caught:
        await mkfs.make(device.path, "xfs")
    assert str(299 * MIB) in caught.value.why
    assert str(300 * MIB) in caught.value.why
    assert devices.is_blank(device.path)


async def test_make_on_exclusively_held_device_is_refused(attach: Attach) -> None:
    device = attach()
    hold = devices.open_exclusive(device.path)
    try:
        with pytest.raises(holders.DeviceInUse):
            await mkfs.make(device.path, "ext4")
    finally:
        os.close(hold)
    assert devices.is_blank(device.path)


async def test_make_unknown_filesystem_is_refused(attach: Attach) -> None:
    device = attach()
    with raised("UnknownFilesystem", match="ext4, xfs"):
        await mkfs.make(device.path, "ntfs")


async def test_make_with_option_mkfs_refuses_fails_with_its_message(attach: Attach) -> None:
    device = attach()
    with pytest.raises(commands.CommandFailed) as caught:
        await mkfs.make(device.path, "ext4", extra_options=("-O", "nosuchfeature"))
    assert "nosuchfeature" in str(caught.value)


@pytest.mark.parametrize("fs_type", supported.SUPPORTED)
@pytest.mark.parametrize("tries_held", [1, 1000])
async def test_make_on_a_device_held_for_a_moment_is_tried_again(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, fs_type: str, tries_held: int
) -> None:
    """A program that starts for another volume has a copy of our own hold until it executes."""
    device = attach(512 * MIB)
    real, tries = commands.run, []

    async def held(argv: Sequence[str], **options: Any) -> commands.Completed:
        tries.append(argv)
        hold = devices.open_exclusive(device.path) if len(tries) <= tries_held else None
        try:
            return await real(argv, **options)
        finally:
            if hold is not None:
                os.close(hold)

    monkeypatch.setattr(commands, "run", held)
    if tries_held == 1:
        await mkfs.make(device.path, fs_type)
        assert isinstance(signatures.probe(device.path), signatures.Filesystem)
        assert len(tries) == 2
    else:
        with pytest.raises(holders.DeviceInUse):
            await mkfs.make(device.path, fs_type)
        assert isinstance(signatures.probe(device.path), signatures.Blank)
