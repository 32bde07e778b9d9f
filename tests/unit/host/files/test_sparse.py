"""Images: made once, never shrunk, never through a link; copies are durable when they have their name."""

import itertools
import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.blockdriver.host import extents, file_copy
from crust.blockdriver.host.extents import Extent, _differences, _merged, _Placed
from crust.core import errors
from crust.host.files import sparse
from tests.support.faults.syncs import recorded
from tests.support.raised import raised


def test_create_image_is_sparse_and_never_shrinks(tmp_path: Path) -> None:
    path = str(tmp_path / "a.img")
    sparse.create(path, 1 << 30)
    assert os.stat(path).st_blocks == 0
    assert os.stat(path).st_mode & 0o777 == 0o600
    Path(path).write_bytes(b"data")
    os.truncate(path, 1 << 30)
    with pytest.raises(errors.Conflict):
        sparse.create(path, 1 << 20)
    assert sparse.size_bytes(path) == 1 << 30
    assert sparse.grow(path, 1 << 20) == 1 << 30
    assert sparse.grow(path, 1 << 31) == 1 << 31
    with open(path, "rb") as image:
        assert image.read(4) == b"data"


def test_create_and_grow_sync_the_image(tmp_path: Path) -> None:
    image = str(tmp_path / "a.img")
    with recorded() as steps:
        sparse.create(image, 1 << 20)
    assert steps == [("sync", image)]
    with recorded() as steps:
        sparse.grow(image, 1 << 21)
    assert steps == [("sync", image)]
    with recorded() as steps:
        sparse.grow(image, 1 << 21)
    assert steps == [("sync", image)], "a process that was killed may have grown it"


def test_image_is_hole_before_first_write_and_after_punch(
    tmp_path: Path,
) -> None:
    image = tmp_path / "a.img"
    sparse.create(str(image), 1 << 30)
    assert sparse.is_hole(str(image))
    with image.open("r+b", buffering=0) as file:
        file.seek((1 << 29) + 5)
        file.write(b"x")
        assert not sparse.is_hole(str(image)), "what is not written back yet is data"
        os.fsync(file)
        assert not sparse.is_hole(str(image))
    os.truncate(image, 1 << 20)
    assert sparse.is_hole(str(image))
    image.write_bytes(bytes(8192))
    assert not sparse.is_hole(str(image)), "zeros that were written are data"
    os.truncate(image, 0)
    assert not sparse.is_hole(str(image)), "an image without a size is none"
    with pytest.raises(errors.NotFound):
        sparse.is_hole(str(tmp_path / "absent"))


def test_create_on_link_or_directory_is_refused(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_bytes(b"untouched")
    link.symlink_to(real)
    os.mkfifo(pipe)
    for path in (link, pipe):
        with pytest.raises(errors.CrustError):
            sparse.create(str(path), 1 << 20)
        with pytest.raises(sparse.NotAnImage):
            sparse.size_bytes(str(path))
    assert real.read_bytes() == b"untouched"
    with pytest.raises(errors.NotFound):
        sparse.grow(str(tmp_path / "absent"), 1)
    with pytest.raises(errors.NotFound):
        sparse.size_bytes(str(tmp_path / "absent"))


def test_space_reports_total_and_available_bytes(tmp_path: Path) -> None:
    space = sparse.space(str(tmp_path))
    assert 0 < space.available_bytes <= space.total_bytes
    assert not space.readonly


def test_allocations_counts_the_blocks_of_regular_files_alone(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 8192)
    sparse.create(str(tmp_path / "hole"), 1 << 20)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("data")
    assert sparse.allocations(str(tmp_path)) == {"data": 8192, "hole": 0}


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


def test_allocated_of_a_fragmented_file_is_not_held(tmp_path: Path) -> None:
    """5,000 parts are half a megabyte as objects."""
    path = tmp_path / "image"
    with path.open("wb") as file:
        for number in range(5000):
            os.pwrite(file.fileno(), b"data", number * 8192)
    tracemalloc.start()
    try:
        assert sum(1 for _ in extents.allocated(path)) == 5000
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()
    rest = [Extent(4096 * 8192, 4096), Extent(4097 * 8192, 4096)]
    assert list(itertools.islice(extents.allocated(path, 4096 * 8192), 2)) == rest


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
