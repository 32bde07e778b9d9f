"""On a full pool the reserve lets unpublish and delete succeed."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from crust import errors
from tests.support.drivers.block_driver import MIB, Bench
from tests.support.drivers.pools import bench_on

pytestmark = pytest.mark.root


@pytest.fixture(params=["ext4", "xfs", "btrfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with bench_on(request.param, tmp_path, size=320 * MIB) as bench:
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


async def test_unpublish_and_delete_on_a_full_disk_succeed(
    small: Bench,
) -> None:
    ids = [(await small.create(name, size=16 * MIB)).volume_id for name in "abcd"]
    for volume_id in ids:
        await small.attach(volume_id)
    fill(small)
    with pytest.raises(errors.Exhausted):
        await small.create("one more", size=16 * MIB)
    for volume_id in ids:
        await small.release(volume_id)
        await small.delete(volume_id)
    (small.root / "fill").unlink()
    assert list((small.root / "state" / "records").iterdir()) == []
