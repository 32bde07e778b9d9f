"""The bytes that files have on their device, by the kernel's word: shared parts once, and never a part of the sum."""

import errno
import fcntl
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from crust.blockdriver.host import extents
from crust.host.answers import NotSeen
from crust.host.process import syscalls
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


def occupied(paths: Iterable[Path]) -> int:
    """The bytes of files all of whose places are known."""
    counted = extents.Occupied()
    for path in paths:
        counted.add(path)
    assert counted.least_bytes() == counted.most_bytes()
    return counted.least_bytes()


def test_occupied_bytes_counts_a_shared_part_once(home: Path) -> None:
    one = written(home / "one", os.urandom(8 * MIB))
    assert occupied([one]) == 8 * MIB
    other = written(home / "other", os.urandom(MIB))
    assert occupied([one, other]) == 9 * MIB
    if not shares(one, home / "copy"):
        return
    assert occupied([one, other, home / "copy"]) == 9 * MIB
    with (home / "copy").open("r+b", buffering=0) as file:
        file.write(os.urandom(MIB))
        os.fsync(file.fileno())
    assert occupied([one, home / "copy"]) == 9 * MIB
    assert occupied([home / "copy"]) == 8 * MIB


def test_occupied_bytes_has_what_is_reserved_and_no_hole(home: Path) -> None:
    with (home / "file").open("wb", buffering=0) as file:
        file.truncate(64 * MIB)
        os.posix_fallocate(file.fileno(), 4 * MIB, 2 * MIB)
        os.fsync(file.fileno())
    assert occupied([home / "file"]) == 2 * MIB
    assert occupied([]) == 0


def test_occupied_bytes_counts_small_file_by_its_blocks_or_inode(home: Path) -> None:
    assert occupied([written(home / "record", b"x" * 512)]) in (0, 4096)


@pytest.mark.parametrize("home", ["btrfs"], indirect=True)
def test_compressed_part_has_no_size_that_is_seen(home: Path) -> None:
    plain, path = written(home / "plain", os.urandom(MIB)), home / "compressed"
    path.touch()
    subprocess.run(["chattr", "+c", str(path)], check=True)
    written(path, b"x" * 8 * MIB)
    counted = extents.Occupied()
    counted.add(plain)
    counted.add(path)
    assert (counted.least_bytes(), counted.most_bytes()) == (MIB, 9 * MIB)


@pytest.mark.parametrize("home", ["xfs", "btrfs"], indirect=True)
def test_files_that_share_blocks_are_in_one_group(home: Path) -> None:
    names = {name: str(written(home / name, os.urandom(MIB))) for name in "abc"}
    assert extents.sharing(names.values()) == []
    for source, copy in (("a", "a2"), ("b", "b2"), ("a2", "a3")):
        assert shares(home / source, home / copy)
        names[copy] = str(home / copy)
    for path in names.values():
        written(Path(path + "-other"), b"x")
    os.sync()
    groups = sorted(sorted(group) for group in extents.sharing(names.values()))
    assert groups == [[names[name] for name in group] for group in (["a", "a2", "a3"], ["b", "b2"])]
    with Path(names["a"]).open("r+b", buffering=0) as file:
        file.write(os.urandom(MIB))
        os.fsync(file.fileno())
    (home / "b2").unlink()
    del names["b2"]
    for _ in range(1000):  # xfs frees what was deleted later
        os.sync()
        groups_left = extents.sharing(names.values())
        if groups_left == [{names["a2"], names["a3"]}]:
            return
    pytest.fail(f"{groups_left} share blocks")


@pytest.mark.parametrize("home", ["xfs", "btrfs"], indirect=True)
def test_added_parts_have_blocks_that_the_base_lacks(home: Path) -> None:
    base, target = written(home / "base", os.urandom(4 * MIB)), home / "target"
    assert shares(base, target)
    with target.open("r+b", buffering=0) as file:
        file.write(os.urandom(MIB))
        syscalls.fallocate(file.fileno(), 0x1 | 0x2, 2 * MIB, MIB)
        file.seek(6 * MIB)
        file.write(os.urandom(MIB))
        os.fsync(file.fileno())
    assert sum(part.length for part in extents.added(base, target)) == 2 * MIB
    assert sum(part.length for part in extents.differing(base, target)) == 3 * MIB


def test_too_many_parts_are_not_seen(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (home / "file").open("wb", buffering=0) as file:
        for number in range(8):
            file.seek(number * 2 * MIB)
            file.write(os.urandom(4096))
        os.fsync(file.fileno())
    assert occupied([home / "file"]) >= 8 * 4096
    monkeypatch.setattr(extents, "_MOST_PARTS", 7)
    with pytest.raises(NotSeen, match="more than 7 parts"):
        occupied([home / "file"])


def test_error_of_the_kernel_is_no_number(home: Path) -> None:
    with pytest.raises(FileNotFoundError):
        occupied([home / "absent"])
    with pytest.raises(OSError) as caught:  # noqa: PT011 - by its errno
        occupied([Path("/proc/self/status")])
    assert caught.value.errno in (errno.ENOTTY, errno.EOPNOTSUPP)
