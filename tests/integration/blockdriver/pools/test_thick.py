"""Thick volumes: their blocks are there when CreateVolume answers, and stay there."""

import fcntl
import itertools
import os
import struct
import subprocess
from pathlib import Path

import pytest

from crust.core import volumes
from tests.integration.blockdriver.conftest import benches_on
from tests.integration.blockdriver.pools.test_capacity import fill, write_all
from tests.support.drivers.block_driver import MIB, Bench, block
from tests.support.raised import raised
from tests.support.records import pool_layout
from tests.support.records.copies import down, in_use, made_of, read_image, up, write

pytestmark = pytest.mark.root

thick = benches_on("ext4", "xfs", size=1024 * MIB)
on_btrfs = benches_on("btrfs")
on_xfs = benches_on("xfs", size=1024 * MIB)
CLASS = {"crust.dev/provisioning": "thick"}
SIZE = 160 * MIB
_BLKDISCARD, _PUNCH_HOLE = 0x1277, 0x03


def allocated(bench: Bench, volume_id: str) -> int:
    return bench.image(volume_id).stat().st_blocks * 512


def run(*argv: str) -> int:
    return subprocess.run(argv, capture_output=True, check=False).returncode


async def test_thick_volume_is_filled_though_others_fill_the_pool(thick: Bench) -> None:
    volume_id = (await thick.create("v", block(), size=SIZE, parameters=CLASS)).volume_id
    assert allocated(thick, volume_id) >= SIZE
    await thick.up(volume_id, thick.target(volume_id), block())
    fill(thick)
    write_all(thick.target(volume_id), 0)
    (thick.root / "fill").unlink()
    await down(thick, volume_id)


async def test_trim_frees_no_block_of_a_thick_volume(thick: Bench) -> None:
    volume_id, target = await in_use(thick, "v", size=SIZE, parameters=CLASS)
    thin, thin_target = await in_use(thick, "thin", size=SIZE)
    for path in (target, thin_target):
        write(path, "file", os.urandom(64 * MIB))
        Path(path, "file").unlink()
        os.sync()
        assert (run("fstrim", path) == 0) == (path == thin_target)
    assert allocated(thick, volume_id) >= SIZE
    assert allocated(thick, thin) < 64 * MIB, "the trim frees the blocks of a thin volume"
    for name in (volume_id, thin):
        await down(thick, name)


@pytest.mark.parametrize("restarted", [False, True], ids=["attached", "found attached"])
async def test_discard_of_a_raw_thick_volume_frees_no_block(
    thick: Bench, monkeypatch: pytest.MonkeyPatch, *, restarted: bool
) -> None:
    """Also where a driver was killed after it had attached the volume: the stage is repeated."""
    volume_id = (await thick.create("v", block(), size=SIZE, parameters=CLASS)).volume_id
    if restarted:
        thick.driver.stores.access.attach(volumes.VolumeId(volume_id))
        thick.restart()
    await thick.up(volume_id, thick.target(volume_id), block())
    target = thick.target(volume_id)
    write_all(target, 0)
    fd = os.open(target, os.O_RDWR)
    try:
        with pytest.raises(OSError, match="not supported"):
            fcntl.ioctl(fd, _BLKDISCARD, struct.pack("=QQ", 0, SIZE))
    finally:
        os.close(fd)
    assert run("fallocate", "--punch-hole", "--length", str(SIZE), target) != 0
    assert allocated(thick, volume_id) >= SIZE
    number = Path(thick.host_device(volume_id).path).name
    await down(thick, volume_id)
    assert not Path(f"/sys/block/{number}/loop").exists()
    queue = Path(f"/sys/block/{number}/queue/discard_max_bytes")
    assert not queue.exists() or int(queue.read_text()) > 0, "its next user has discards"


async def test_thick_volume_keeps_its_blocks_after_snapshot_and_growth(thick: Bench) -> None:
    volume_id, target = await in_use(thick, "v", block(), size=SIZE, parameters=CLASS)
    write_all(target, SIZE // 2)
    await down(thick, volume_id)
    taken = await thick.co.snapshot(volume_id)
    await up(thick, volume_id, raw=True)
    write_all(target, SIZE // 4)
    await thick.co.delete_snapshot(taken.snapshot_id)
    assert allocated(thick, volume_id) >= SIZE
    await thick.grow(volume_id, 2 * SIZE)
    assert allocated(thick, volume_id) >= 2 * SIZE
    fill(thick)
    write_all(target, 0)
    (thick.root / "fill").unlink()
    await down(thick, volume_id)


async def test_pool_with_snapshot_of_thick_volume_fills_every_volume(on_xfs: Bench) -> None:
    """It needs new blocks for what it shares, until the snapshot is deleted: no other volume is promised them."""
    bench, names = on_xfs, itertools.count()

    async def fill_all(*ids: str, least: int) -> tuple[str, ...]:
        """Promise what is left, then write each volume full, after a restart too."""
        left = 0
        while left < least:  # xfs frees the blocks of an unlinked file after unlink(2) has returned
            left = await bench.co.capacity(parameters=CLASS)
        one_more = (
            await bench.create(f"v{next(names)}", block(), size=left, parameters=CLASS)
        ).volume_id
        assert await bench.co.capacity() == 0
        bench.restart()
        await bench.up(one_more, bench.target(one_more), block())
        for volume_id in (*ids, one_more):
            write_all(bench.target(volume_id), 0)
        assert await bench.co.capacity() == 0
        return *ids, one_more

    before = await bench.co.capacity(parameters=CLASS)
    thick, target = await in_use(bench, "thick", block(), size=SIZE, parameters=CLASS)
    write_all(target, 0)
    taken = await bench.co.snapshot(thick)
    assert before - await bench.co.capacity(parameters=CLASS) >= 2 * SIZE
    ids = await fill_all(thick, least=MIB)
    await bench.co.delete_snapshot(taken.snapshot_id)
    bench.restart()
    ids = await fill_all(*ids, least=SIZE)
    for volume_id in ids:
        assert allocated(bench, volume_id) >= bench.image(volume_id).stat().st_size
        await down(bench, volume_id)


async def test_copies_that_are_thick_have_blocks_of_their_own(thick: Bench) -> None:
    """A block that is shared needs a new one when it is written: other files may have taken it."""
    source, target = await in_use(thick, "source", block(), size=SIZE)
    write_all(target, SIZE // 2)
    await down(thick, source)
    taken = await thick.co.snapshot(source)
    ids = [
        (await made_of(thick, "clone", volume_id=source, raw=True, parameters=CLASS)).volume_id,
        (
            await made_of(
                thick, "restored", snapshot_id=taken.snapshot_id, raw=True, parameters=CLASS
            )
        ).volume_id,
    ]
    content = thick.image(source).read_bytes()
    for volume_id in ids:
        assert allocated(thick, volume_id) >= SIZE
        assert thick.image(volume_id).read_bytes() == content
    for volume_id in ids:
        await thick.up(volume_id, thick.target(volume_id), block())
    fill(thick)
    for volume_id in ids:
        write_all(thick.target(volume_id), 0)
    (thick.root / "fill").unlink()
    for volume_id in ids:
        await down(thick, volume_id)
    assert read_image(thick, taken.snapshot_id) == content


async def test_thick_creation_without_space_leaves_nothing(thick: Bench) -> None:
    left = await thick.co.capacity(parameters=CLASS)
    with raised("OutOfCapacity"):
        await thick.create("v", block(), size=left + MIB, parameters=CLASS)
    made = await thick.create("v", block(), size=left, parameters=CLASS)
    assert await thick.co.capacity(parameters=CLASS) == 0
    await thick.delete(made.volume_id)
    assert pool_layout.files(thick.root / "state") == set()


async def test_growth_without_space_leaves_a_thick_volume_as_it_was(thick: Bench) -> None:
    """Others took the space after it was reserved."""
    volume_id = (await thick.create("v", block(), size=SIZE, parameters=CLASS)).volume_id
    before = thick.image(volume_id).stat()
    fill(thick)
    os.truncate(thick.root / "fill", (thick.root / "fill").stat().st_size - 64 * MIB)
    grow = thick.driver.stores.provisioning.grow
    with raised("PoolFull"):
        grow(volumes.VolumeId(volume_id), 2 * SIZE, thick=True)
    after = thick.image(volume_id).stat()
    assert after.st_size == SIZE
    assert after.st_blocks - before.st_blocks <= 64, "ext4 may keep a block of its extent tree"
    (thick.root / "fill").unlink()
    grow(volumes.VolumeId(volume_id), 2 * SIZE, thick=True)
    assert allocated(thick, volume_id) >= 2 * SIZE


async def test_device_of_a_volume_on_btrfs_frees_no_block(on_btrfs: Bench) -> None:
    """A part of an extent that is discarded stays allocated, and a write there takes another block."""
    volume_id, target = await in_use(on_btrfs, "v", block(), size=SIZE)
    write_all(target, 0)
    assert run("blkdiscard", target) != 0
    assert allocated(on_btrfs, volume_id) >= SIZE
    await down(on_btrfs, volume_id)


async def test_thick_volume_on_btrfs_is_refused(on_btrfs: Bench) -> None:
    with raised("ThickNotPossible"):
        await on_btrfs.create("v", parameters=CLASS)
    assert await on_btrfs.co.capacity(parameters=CLASS) == 0
    assert await on_btrfs.co.capacity() > 0
