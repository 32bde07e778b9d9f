"""The parts of a file that have data, and those in which two files differ."""

import itertools
import os
import random
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.blockdriver.host import extents
from crust.blockdriver.host.extents import Extent, _differences, _merged, _Placed


def differing(old: list[_Placed], new: list[_Placed]) -> list[Extent]:
    return list(_merged(_differences(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        # the same blocks in one extent and in two
        ([_Placed(0, 100, 1000)], [_Placed(0, 40, 1000), _Placed(40, 100, 1040)], []),
        ([_Placed(0, 10, 1000)], [_Placed(20, 30, 2000)], [Extent(0, 10), Extent(20, 10)]),
        ([], [], []),
        # no block whose position is not known is that of another file
        ([_Placed(0, 10, None)], [_Placed(0, 10, None)], [Extent(0, 10)]),
    ],
)
def test_differing_reports_what_is_not_the_same_blocks(
    old: list[_Placed], new: list[_Placed], expected: list[Extent]
) -> None:
    assert differing(old, new) == expected
    assert differing(new, old) == expected


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
        ranges = differing(placed(old), placed(new))
        assert {n for part in ranges for n in range(part.offset, part.end)} == expected
        assert ranges == sorted(ranges)


def test_differing_from_a_byte_on_is_the_rest() -> None:
    old = [_Placed(0, 30, 1000), _Placed(50, 70, 2000)]
    new = [_Placed(0, 10, 1000), _Placed(10, 40, 3000), _Placed(60, 80, 2010)]
    whole = differing(old, new)
    assert whole == [Extent(10, 30), Extent(50, 10), Extent(70, 10)]
    for start in range(90):
        rest = [
            Extent(max(part.offset, start), part.end - max(part.offset, start))
            for part in whole
            if part.end > start
        ]
        assert list(_merged(_differences(old, new, start))) == rest


def test_differing_of_fragmented_files_reads_no_further_than_asked() -> None:
    """The answer whether two files differ needs the first difference alone."""
    read = {"old": 0, "new": 0}

    def fragments(name: str) -> Iterator[_Placed]:
        for number in range(1000):
            read[name] += 1
            yield _Placed(2 * number, 2 * number + 1, number if name == "old" else None)

    parts = _merged(_differences(fragments("old"), fragments("new")))
    assert [next(parts) for _ in range(3)] == [Extent(0, 1), Extent(2, 1), Extent(4, 1)]
    assert max(read.values()) <= 5


@pytest.fixture
def fragmented() -> Iterator[Path]:
    """A file in 5,000 parts, not on a tmpfs, which has no FIEMAP."""
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        for number in range(5000):
            os.pwrite(file.fileno(), b"data", number * 8192)
        yield Path(file.name)


def test_walk_of_a_fragmented_file_rests_after_each_batch(
    fragmented: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it holds the interpreter for a part of the time, however many parts a tenant made."""
    rests = 0

    def rest(_: float) -> None:
        nonlocal rests
        rests += 1

    monkeypatch.setattr(time, "sleep", rest)
    for walk in (
        lambda: extents.allocated(fragmented),
        lambda: extents.added(fragmented, fragmented),
        lambda: extents.sharing([os.fspath(fragmented)]),
        lambda: extents.Occupied().add(fragmented),
    ):
        rests = 0
        for _ in walk() or ():
            pass
        assert rests >= 5000 // 512


@pytest.mark.parametrize("directory", ["/var/tmp", "/dev/shm"])
def test_allocated_is_the_same_with_fiemap_and_without(directory: str) -> None:
    """From a byte within a part on, and no further than the file: its last part ends within a block."""
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        for offset in (0, 4096, 16384):
            os.pwrite(file.fileno(), b"data" * 1024, offset)
        os.truncate(file.name, 16384 + 100)
        assert [*extents.allocated(file.name)] == [Extent(0, 8192), Extent(16384, 100)]
        assert [*extents.allocated(file.name, 2048)] == [Extent(2048, 6144), Extent(16384, 100)]


def test_allocated_of_a_fragmented_file_is_not_held(fragmented: Path) -> None:
    """5,000 parts are half a megabyte as objects."""
    path = fragmented
    tracemalloc.start()
    try:
        assert sum(1 for _ in extents.allocated(path)) == 5000
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()
    rest = [Extent(4096 * 8192, 4096), Extent(4097 * 8192, 4096)]
    assert list(itertools.islice(extents.allocated(path, 4096 * 8192), 2)) == rest
