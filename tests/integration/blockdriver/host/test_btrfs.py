"""The free space of a btrfs, whose statvfs(3) counts a write at the next commit of a transaction."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.blockdriver.host import btrfs
from crust.host.answers import NotSeen
from crust.host.files import sparse
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


def test_another_filesystem_has_no_id_and_nothing_uncounted(tmp_path: Path) -> None:
    with mounted("ext4", tmp_path, tmp_path / "ext4", size=64 * MIB):
        assert btrfs.filesystem_id(tmp_path / "ext4") == ""
        assert btrfs.uncounted_bytes(tmp_path / "ext4") == 0


def test_hidden_sysfs_is_no_answer(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(btrfs, "_SYSFS", "/absent")
    with pytest.raises(NotSeen, match="the free space of"):
        btrfs.uncounted_bytes(home)
