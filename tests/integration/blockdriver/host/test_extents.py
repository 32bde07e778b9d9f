"""The bytes that files have on their device, by the kernel's word: shared parts once, and never a part of the sum."""

import errno
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.blockdriver.host import extents
from crust.host.answers import NotSeen
from tests.support.drivers.pools import mounted

pytestmark = pytest.mark.root

MIB = 1 << 20
FICLONE = 0x40049409


@pytest.fixture(params=["ext4", "xfs", "btrfs"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(request.param, tmp_path, tmp_path / "home", size=512 * MIB):
        yield tmp_path / "home"


def written(path: Path, data: bytes) -> Path:
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
    return path


def shares(source: Path, copy: Path) -> bool:
    with source.open("rb") as read, copy.open("wb") as write:
        try:
            fcntl.ioctl(write, FICLONE, read.fileno())
        except OSError:
            return False
    return True


def test_occupied_bytes_counts_a_shared_part_once(home: Path) -> None:
    one = written(home / "one", os.urandom(8 * MIB))
    assert extents.occupied_bytes([one]) == 8 * MIB
    other = written(home / "other", os.urandom(MIB))
    assert extents.occupied_bytes([one, other]) == 9 * MIB
    if not shares(one, home / "copy"):
        return
    assert extents.occupied_bytes([one, other, home / "copy"]) == 9 * MIB
    with (home / "copy").open("r+b", buffering=0) as file:
        file.write(os.urandom(MIB))
        os.fsync(file.fileno())
    assert extents.occupied_bytes([one, home / "copy"]) == 9 * MIB
    assert extents.occupied_bytes([home / "copy"]) == 8 * MIB


def test_occupied_bytes_has_what_is_reserved_and_no_hole(home: Path) -> None:
    with (home / "file").open("wb", buffering=0) as file:
        file.truncate(64 * MIB)
        os.posix_fallocate(file.fileno(), 4 * MIB, 2 * MIB)
        os.fsync(file.fileno())
    assert extents.occupied_bytes([home / "file"]) == 2 * MIB
    assert extents.occupied_bytes([]) == 0


def test_occupied_bytes_counts_small_file_by_its_blocks_or_inode(home: Path) -> None:
    assert extents.occupied_bytes([written(home / "record", b"x" * 512)]) in (0, 4096)


@pytest.mark.parametrize("home", ["btrfs"], indirect=True)
def test_compressed_part_has_no_size_that_is_seen(home: Path) -> None:
    plain, path = written(home / "plain", os.urandom(MIB)), home / "compressed"
    path.touch()
    subprocess.run(["chattr", "+c", str(path)], check=True)
    written(path, b"x" * 8 * MIB)
    with pytest.raises(NotSeen, match="does not say where"):
        extents.occupied_bytes([plain, path])


def test_too_many_parts_are_not_seen(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (home / "file").open("wb", buffering=0) as file:
        for number in range(8):
            file.seek(number * 2 * MIB)
            file.write(os.urandom(4096))
        os.fsync(file.fileno())
    assert extents.occupied_bytes([home / "file"]) >= 8 * 4096
    monkeypatch.setattr(extents, "_MOST_PARTS", 7)
    with pytest.raises(NotSeen, match="more than 7 parts"):
        extents.occupied_bytes([home / "file"])


def test_error_of_the_kernel_is_no_number(home: Path) -> None:
    with pytest.raises(FileNotFoundError):
        extents.occupied_bytes([home / "absent"])
    with pytest.raises(OSError) as caught:  # noqa: PT011 - by its errno
        extents.occupied_bytes(["/proc/self/status"])
    assert caught.value.errno in (errno.ENOTTY, errno.EOPNOTSUPP)
