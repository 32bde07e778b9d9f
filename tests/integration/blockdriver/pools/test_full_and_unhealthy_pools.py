"""A pool that is full or unhealthy, and the reserve that deletions need."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from crust.core import errors
from tests.support.drivers.block_driver import MIB, Bench
from tests.support.drivers.pools import bench_on
from tests.support.records import pool_layout
from tests.support.records.copies import down, up, write

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]


@pytest.fixture(params=["ext4", "xfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with bench_on(request.param, tmp_path, size=512 * MIB) as bench:
        yield bench


def fill(bench: Bench) -> None:
    """Every block, the filesystem's reserve for root too."""
    with (bench.root / "fill").open("wb", buffering=0) as file:
        for size in (16 * MIB, MIB, 4096):
            with suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)
        with suppress(OSError):
            while True:  # what the filesystem keeps back from an allocation without data
                file.write(bytes(4096))
        os.fsync(file.fileno())


async def test_delete_on_a_full_pool_succeeds(small: Bench) -> None:
    source, other = await small.create("source"), await small.create("other")
    target = await up(small, source.volume_id)
    write(target, "file", b"x" * MIB)
    taken, members = (
        await small.co.snapshot(source.volume_id),
        await small.co.group(source.volume_id),
    )
    await down(small, source.volume_id)
    fill(small)
    with pytest.raises(OSError, match="No space left"):
        (small.root / "state" / "more").write_bytes(b"x" * 4096)
    await small.co.delete_group(members)
    await small.co.delete_snapshot(taken.snapshot_id)
    for volume in (source, other):
        await small.delete(volume.volume_id)
    (small.root / "fill").unlink()
    assert pool_layout.files(small.root / "state") == set()


async def test_capacity_excludes_other_files_in_the_pool(small: Bench) -> None:
    await small.create("one", size=64 * MIB)
    before = await small.co.capacity()
    with (small.root / "others").open("wb") as file:
        file.write(bytes(100 * MIB))
        os.fsync(file.fileno())
    small.restart()
    assert abs(before - await small.co.capacity() - 100 * MIB) <= MIB


@pytest.fixture(params=["ext4", "xfs", "btrfs"])
def reserving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with bench_on(request.param, tmp_path, size=320 * MIB) as bench:
        yield bench


async def test_unpublish_and_delete_on_a_full_disk_succeed(reserving: Bench) -> None:
    ids = [(await reserving.create(name, size=16 * MIB)).volume_id for name in "abcd"]
    for volume_id in ids:
        await reserving.attach(volume_id)
    fill(reserving)
    with pytest.raises(errors.Exhausted):
        await reserving.create("one more", size=16 * MIB)
    for volume_id in ids:
        await reserving.release(volume_id)
        await reserving.delete(volume_id)
    (reserving.root / "fill").unlink()
    assert pool_layout.files(reserving.root / "state") == set()
