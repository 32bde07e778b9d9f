"""Copies of files: durable when they have their name; which parts of two files differ."""

import random
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.files import extents, file_copy
from crust.host.files.extents import Extent, _differences, _merged, _Placed
from tests.support.faults.syncs import recorded
from tests.support.raised import raised


def test_copy_is_synced_before_its_name_and_the_name_after(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"every byte" * 1000)
    with recorded() as steps:
        file_copy.copy(str(source), str(target), least_bytes=10)
    assert target.read_bytes() == source.read_bytes()
    kinds = [kind for kind, _ in steps]
    assert kinds == ["sync", "name", "sync"]
    assert steps[0][1] not in (str(source), str(target), str(tmp_path))
    assert steps[1:] == [("name", str(target)), ("sync", str(tmp_path))]


def differing(old: list[_Placed], new: list[_Placed]) -> list[Extent]:
    return list(_merged(_differences(old, new)))


def test_differing_ignores_shared_blocks_in_different_extents() -> None:
    whole = [_Placed(0, 100, 1000)]
    parts = [_Placed(0, 40, 1000), _Placed(40, 100, 1040)]
    assert differing(whole, parts) == []
    assert differing(parts, whole) == []


def test_differing_reports_data_of_one_file_and_no_common_hole() -> None:
    old = [_Placed(0, 10, 1000)]
    new = [_Placed(20, 30, 2000)]
    assert differing(old, new) == [Extent(0, 10), Extent(20, 10)]
    assert differing([], []) == []


def test_differing_reports_blocks_without_a_known_position() -> None:
    unknown = [_Placed(0, 10, None)]
    assert differing(unknown, unknown) == [Extent(0, 10)]


def test_differing_matches_a_comparison_of_each_block() -> None:
    chance = random.Random(7)

    def blocks() -> dict[int, int]:
        return {n: chance.choice((n, n + 100)) for n in range(40) if chance.random() < 0.7}

    def placed(of: dict[int, int]) -> list[_Placed]:
        runs: list[_Placed] = []
        for n, place in sorted(of.items()):
            last = runs[-1] if runs else None
            joins = last is not None and last.end == n and chance.random() < 0.5
            if joins and last is not None and last.place == place - (n - last.start):
                runs[-1] = _Placed(last.start, n + 1, last.place)
            else:
                runs.append(_Placed(n, n + 1, place))
        return runs

    for _ in range(200):
        old, new = blocks(), blocks()
        expected = {n for n in range(40) if old.get(n) != new.get(n)}
        found = differing(placed(old), placed(new))
        assert {n for each in found for n in range(each.offset, each.end)} == expected
        assert found == sorted(found)


def test_copy_keeps_bytes_and_holes_and_sets_the_mode(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(8 << 20)
        file.seek(3 << 20)
        file.write(b"data" * 1024)
    file_copy.copy(str(source), str(target), least_bytes=8 << 20, grow_to_bytes=9 << 20, mode=0o400)
    assert target.read_bytes() == source.read_bytes() + bytes(1 << 20)
    assert target.stat().st_mode & 0o777 == 0o400
    assert sum(each.length for each in extents.allocated(str(target))) < 1 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_copy_of_a_short_or_absent_source_leaves_no_file(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"short")
    with raised("SourceTooShort"):
        file_copy.copy(str(source), str(target), least_bytes=6)
    with pytest.raises(errors.NotFound):
        file_copy.copy(str(tmp_path / "none"), str(target), least_bytes=0)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
