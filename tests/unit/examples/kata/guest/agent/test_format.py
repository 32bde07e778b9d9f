"""A guest makes a filesystem only on a disk whose every window reads zero."""

import subprocess
from pathlib import Path

import pytest

from crust.host.block import devices
from examples.kata.guest.agent import format, protocol

MIB = 1024 * 1024
NONE: "format.Format" = {"bytes_per_inode": None, "reserved_percent": None}
SIZE = 200 * MIB


def disk(path: Path, *, size: int = SIZE) -> Path:
    with path.open("wb") as image:
        image.truncate(size)
    return path


def starts(size: int) -> list[int]:
    return [offset + size if offset < 0 else offset for offset, _ in format.WINDOWS]


def test_guest_and_host_look_at_the_same_windows() -> None:
    assert format.WINDOWS == devices.PROBE_WINDOWS


@pytest.mark.parametrize("window", range(len(format.WINDOWS)))
@pytest.mark.parametrize("edge", ["first", "last"])
def test_one_byte_in_any_window_is_not_blank(tmp_path: Path, window: int, edge: str) -> None:
    size = 257 * 1024 * MIB  # sparse; the last window but one is at 256 GiB
    path = disk(tmp_path / "disk", size=size)
    assert format.is_blank(str(path))
    offset, length = starts(size)[window], format.WINDOWS[window][1]
    with path.open("r+b") as image:
        image.seek(offset if edge == "first" else offset + length - 1)
        image.write(b"\1")
    assert not format.is_blank(str(path))


@pytest.mark.parametrize("size", [4096, 64 * 1024, 3 * MIB])
def test_disk_smaller_than_window_is_read_to_its_end(tmp_path: Path, size: int) -> None:
    path = disk(tmp_path / "disk", size=size)
    assert format.is_blank(str(path))
    with path.open("r+b") as image:
        image.seek(size - 1)
        image.write(b"\1")
    assert not format.is_blank(str(path))


def test_disk_without_size_is_an_error_and_not_blank(tmp_path: Path) -> None:
    with pytest.raises(protocol.Fault, match="no size"):
        format.is_blank(str(disk(tmp_path / "disk", size=0)))


@pytest.mark.parametrize("other", ["partition table", "filesystem", "lvm"])
def test_disk_with_something_on_it_is_left_as_it_is(tmp_path: Path, other: str) -> None:
    path = disk(tmp_path / "disk")
    if other == "filesystem":
        subprocess.run(["mkfs.ext4", "-q", path], check=True, capture_output=True)
    else:
        with path.open("r+b") as image:
            image.seek(510 if other == "partition table" else 512)
            image.write(b"\x55\xaa" if other == "partition table" else b"LABELONE")
    before = path.read_bytes()
    assert not format.make_if_blank(str(path), "ext4", NONE)
    assert path.read_bytes() == before


def test_filesystem_without_an_mkfs_in_the_guest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(protocol.Fault, match="cannot make ntfs"):
        format.make_if_blank(str(disk(tmp_path / "disk")), "ntfs", NONE)
