"""Copies of files: durable when they have their name."""

from pathlib import Path

import pytest

from crust.blockdriver.host import extents, file_copy
from crust.core import errors
from tests.support.faults.syncs import recorded
from tests.support.raised import raised


def test_copy_is_synced_before_it_gets_its_name(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"every byte" * 1000)
    with recorded() as steps:
        file_copy.copy(str(source), str(target), least_bytes=10)
    assert target.read_bytes() == source.read_bytes()
    kinds = [kind for kind, _ in steps]
    assert kinds == ["sync", "name"]
    assert steps[0][1] not in (str(source), str(target), str(tmp_path))
    assert steps[1:] == [("name", str(target))]


def test_copy_keeps_bytes_and_holes_and_sets_the_mode(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(8 << 20)
        file.seek(3 << 20)
        file.write(b"data" * 1024)
    file_copy.copy(str(source), str(target), least_bytes=8 << 20, grow_to_bytes=9 << 20, mode=0o400)
    assert target.read_bytes() == source.read_bytes() + bytes(1 << 20)
    assert target.stat().st_mode & 0o777 == 0o400
    assert sum(extent.length for extent in extents.allocated(str(target))) < 1 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_copy_of_a_short_or_absent_source_leaves_no_file(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"short")
    with raised("SourceTooShort"):
        file_copy.copy(str(source), str(target), least_bytes=6)
    with pytest.raises(errors.NotFound):
        file_copy.copy(str(tmp_path / "none"), str(target), least_bytes=0)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
