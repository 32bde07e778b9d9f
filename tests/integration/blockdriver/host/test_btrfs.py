"""What differs on btrfs: its statvfs(3) counts a write at the next commit, and files may be written in place."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.blockdriver.host import btrfs, extents, file_copy
from crust.host.answers import NotSeen
from crust.host.files import attributes, sparse
from crust.host.files.attributes import NO_COPY_ON_WRITE
from tests.support.drivers.block_driver import MIB
from tests.support.drivers.pools import mounted

pytestmark = pytest.mark.root


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with mounted("btrfs", tmp_path, tmp_path / "home", size=512 * MIB):
        yield tmp_path / "home"


def free(home: Path) -> int:
    uncounted = btrfs.uncounted_bytes(home)
    return sparse.space(home).available_bytes - uncounted


def test_write_is_counted_before_the_commit_of_its_transaction(home: Path) -> None:
    os.sync()
    before = free(home)
    path = home / "file"
    path.write_bytes(os.urandom(32 * MIB))
    assert btrfs.uncounted_bytes(home) >= 32 * MIB
    assert before - free(home) >= 32 * MIB
    with path.open("rb") as file:
        os.fsync(file.fileno())
    assert before - free(home) >= 32 * MIB
    os.sync()
    assert btrfs.uncounted_bytes(home) <= MIB
    assert 32 * MIB <= before - free(home) <= 33 * MIB


@pytest.mark.parametrize("in_place", [True, False])
def test_clone_is_written_in_place_as_its_source_is(home: Path, *, in_place: bool) -> None:
    """The kernel clones no file of the one kind to one of the other."""
    source, target = home / "source", home / "target"
    sparse.create(source, MIB, in_place=in_place)
    source.write_bytes(os.urandom(MIB))
    file_copy.copy(source, target, least_bytes=MIB, at_once=True)
    assert target.read_bytes() == source.read_bytes()
    for path in (source, target):
        with path.open("rb") as file:
            assert bool((attributes.of(file.fileno()) or 0) & NO_COPY_ON_WRITE) == in_place


@pytest.mark.parametrize("is_committed", [True, False])
def test_deleted_clone_shares_its_extents_until_a_commit(home: Path, *, is_committed: bool) -> None:
    """Until then a write takes a new block, though FIEMAP calls the extent unshared."""
    source, clone, kept = home / "source", home / "clone", 8 * MIB - 4096
    sparse.create(source, 8 * MIB, in_place=True)
    source.write_bytes(os.urandom(8 * MIB))
    file_copy.copy(source, clone, least_bytes=0, at_once=True)
    before = used_bytes(home)
    clone.unlink()
    if is_committed:
        btrfs.commit(home)
    unshared = extents.Occupied()
    unshared.add(source, shared=False)
    assert unshared.most_bytes() == 8 * MIB
    with source.open("r+b") as file:
        file.write(os.urandom(kept))
        os.fsync(file.fileno())
    assert (used_bytes(home) - before >= kept) != is_committed


def used_bytes(home: Path) -> int:
    """Once all is committed."""
    os.sync()
    space = sparse.space(home)
    return space.total_bytes - space.available_bytes


def test_another_filesystem_has_no_id(tmp_path: Path) -> None:
    with mounted("ext4", tmp_path, tmp_path / "ext4", size=64 * MIB):
        assert btrfs.filesystem_id(tmp_path / "ext4") == ""


def test_hidden_sysfs_is_no_answer(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(btrfs, "_SYSFS", "/absent")
    with pytest.raises(NotSeen, match="the free space of"):
        btrfs.uncounted_bytes(home)
