"""Superblock fields, from bytes laid out by hand."""

import struct
from pathlib import Path

import pytest

from crust.host.filesystems import superblocks


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
    return str(path)


def test_read_ext4_size_is_blocks_times_block_size(tmp_path: Path) -> None:
    found = superblocks.read_ext4(ext4(tmp_path / "a"))
    assert (found.block_size_bytes, found.size_bytes, found.clean) == (4096, 4_096_000, True)


def test_read_ext4_uses_the_high_half_only_with_the_64bit_feature(tmp_path: Path) -> None:
    high = (0x150, "<I", 1)
    assert superblocks.read_ext4(ext4(tmp_path / "a", high=high)).blocks == 1000
    wide = ext4(tmp_path / "b", high=high, incompat=(0x60, "<I", 0x80))
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
    ],
)
def test_read_ext4_due_for_a_check_is_not_clean(
    tmp_path: Path, field: tuple[int, str, int]
) -> None:
    assert not superblocks.read_ext4(ext4(tmp_path / "a", state=(0x3A, "<H", 1), x=field)).clean


def test_read_ext4_with_mount_count_at_its_limit_is_not_clean(tmp_path: Path) -> None:
    count, limit = (0x34, "<H", 20), (0x36, "<h", 20)
    assert not superblocks.read_ext4(ext4(tmp_path / "a", count=count, max_mounts=limit)).clean
    assert superblocks.read_ext4(ext4(tmp_path / "a", max_mounts=limit)).clean


def test_read_xfs_is_big_endian(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"XFSB" + struct.pack(">IQ", 4096, 2**33))
    assert superblocks.read_xfs(str(tmp_path / "a")).size_bytes == 4096 * 2**33


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"x" * 4096])
def test_read_of_another_magic_raises_invalid_superblock(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    for read in (superblocks.read_ext4, superblocks.read_xfs):
        with pytest.raises(superblocks.InvalidSuperblock):
            read(str(tmp_path / "a"))
