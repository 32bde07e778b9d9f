"""Superblock fields, from bytes laid out by hand."""

import os
import struct
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

from crust.host.filesystems import superblocks

_DEVICE_BYTES = 8 * 1024**4
"""More than any filesystem here says that it has; the files are sparse."""


def ext4(path: Path, **fields: tuple[int, str, int]) -> str:
    """A file with an ext superblock: 4 KiB blocks, 1000 of them, clean; `fields` are (offset, code, value)."""
    data = bytearray(4096)
    default = {
        "magic": (0x38, "<H", 0xEF53),
        "blocks": (0x04, "<I", 1000),
        "log_block": (0x18, "<I", 2),
        "state": (0x3A, "<H", 1),
        "max_mounts": (0x36, "<h", -1),
    }
    for offset, code, value in {**default, **fields}.values():
        struct.pack_into(code, data, 1024 + offset, value)
    path.write_bytes(data)
    os.truncate(path, _DEVICE_BYTES)
    return str(path)


def test_read_ext4_size_is_blocks_times_block_size(tmp_path: Path) -> None:
    block = superblocks.read_ext4(ext4(tmp_path / "a"))
    assert (block.block_size_bytes, block.size_bytes, block.clean) == (4096, 4_096_000, True)


def test_read_ext4_uses_high_half_only_with_64bit_feature(tmp_path: Path) -> None:
    high = (0x150, "<I", 1)
    assert superblocks.read_ext4(ext4(tmp_path / "a", high=high)).blocks == 1000
    small = {"log_block": (0x18, "<I", 0)}
    wide = ext4(tmp_path / "b", high=high, incompat=(0x60, "<I", 0x80), **small)
    assert superblocks.read_ext4(wide).blocks == 2**32 + 1000


@pytest.mark.parametrize(
    "field",
    [
        pytest.param((0x3A, "<H", 0), id="not unmounted cleanly"),
        pytest.param((0x3A, "<H", 3), id="errors recorded"),
        pytest.param((0x60, "<I", 0x4), id="journal to replay"),
        pytest.param((0xE8, "<I", 12), id="orphan inodes"),
        pytest.param((0x64, "<I", 0x10000), id="orphan file in use"),
        pytest.param((0x44, "<I", 86400), id="checked at intervals"),
        pytest.param((0x34, "<H", 20), id="mounted as often as it may be"),
    ],
)
def test_ext4_due_for_a_check_is_not_clean(tmp_path: Path, field: tuple[int, str, int]) -> None:
    limit = (0x36, "<h", 20)
    assert superblocks.read_ext4(ext4(tmp_path / "a", max_mounts=limit)).clean
    assert not superblocks.read_ext4(ext4(tmp_path / "a", max_mounts=limit, x=field)).clean


def xfs(path: Path, block_bytes: int, blocks: int) -> str:
    path.write_bytes(b"XFSB" + struct.pack(">IQ", block_bytes, blocks))
    os.truncate(path, _DEVICE_BYTES)
    return str(path)


def btrfs(path: Path, sector_bytes: int, total_bytes: int) -> str:
    data = bytearray(1024)
    data[0x40:0x48] = b"_BHRfS_M"
    struct.pack_into("<Q", data, 0x70, total_bytes)
    struct.pack_into("<I", data, 0x90, sector_bytes)
    path.write_bytes(bytes(64 * 1024) + data)
    os.truncate(path, _DEVICE_BYTES)
    return str(path)


def test_read_xfs_is_big_endian(tmp_path: Path) -> None:
    assert superblocks.read_xfs(xfs(tmp_path / "a", 4096, 2**29)).size_bytes == 4096 * 2**29


@pytest.mark.parametrize(
    "shift", [7, 22, 31, 63, 2**32 - 1], ids=lambda shift: f"1024 shifted by {shift}"
)
def test_ext4_block_size_above_the_formats_limit_is_invalid(tmp_path: Path, shift: int) -> None:
    """A guest wrote it: 1024 << (2**32 - 1) is a number of half a gibibyte."""
    path = ext4(tmp_path / "a", log_block=(0x18, "<I", shift))
    with pytest.raises(superblocks.InvalidSuperblock, match=str(shift)):
        superblocks.read_ext4(path)


@pytest.mark.parametrize(
    ("fs_type", "unit_bytes"),
    [
        *(("xfs", size) for size in (0, 1, 513, 131072, 2**31)),
        *(("btrfs", size) for size in (0, 512, 5000, 2**31)),
    ],
)
def test_impossible_block_of_xfs_and_sector_of_btrfs_are_invalid(
    tmp_path: Path, fs_type: str, unit_bytes: int
) -> None:
    write = {"xfs": xfs, "btrfs": btrfs}[fs_type]
    with pytest.raises(superblocks.InvalidSuperblock):
        superblocks.read(write(tmp_path / "a", unit_bytes, 2**20), fs_type)


def test_filesystem_larger_than_its_device_is_invalid(tmp_path: Path) -> None:
    more = _DEVICE_BYTES // 4096 + 1
    for read, path in (
        (superblocks.read_xfs, xfs(tmp_path / "a", 4096, more)),
        (superblocks.read_btrfs, btrfs(tmp_path / "b", 4096, more * 4096)),
    ):
        with pytest.raises(superblocks.InvalidSuperblock, match="its device has"):
            read(path)


@hypothesis.given(
    head=strategies.binary(max_size=2048), tail=strategies.binary(min_size=0, max_size=1024)
)
def test_any_bytes_are_a_superblock_within_the_device_or_invalid(
    tmp_path_factory: pytest.TempPathFactory, head: bytes, tail: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    magics = {"ext4": (1080, b"\x53\xef"), "xfs": (0, b"XFSB"), "btrfs": (65600, b"_BHRfS_M")}
    for fs_type, (offset, magic) in magics.items():
        data = bytearray(head.ljust(65536, b"\xff") + tail.ljust(1024, b"\xff"))
        data[offset : offset + len(magic)] = magic
        path.write_bytes(data)
        try:
            superblock = superblocks.read(str(path), fs_type)
        except superblocks.InvalidSuperblock:
            continue
        assert 0 < superblock.size_bytes <= len(data)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"x" * 4096])
def test_read_of_another_magic_raises_invalid_superblock(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    for read in (superblocks.read_ext4, superblocks.read_xfs):
        with pytest.raises(superblocks.InvalidSuperblock):
            read(str(tmp_path / "a"))
