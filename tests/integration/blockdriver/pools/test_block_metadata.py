"""The lists of changed and allocated blocks, as SnapshotMetadata streams them: short, and refused where unknown."""

import os

import pytest

from crust.blockdriver.engines import protocol
from tests.support.drivers.block_driver import MIB, Bench, block
from tests.support.raised import raised
from tests.support.records.copies import (
    blocks,
    covered,
    differing_blocks,
    down,
    read_image,
    snapshot,
    up,
    write,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

KIB = 1024


async def test_changed_blocks_match_a_byte_comparison(
    cloning: Bench,
) -> None:
    source = await cloning.create("source", block())
    target = await up(cloning, source.volume_id, raw=True)

    def scribble(offset: int, size: int) -> None:
        fd = os.open(target, os.O_WRONLY)
        os.pwrite(fd, os.urandom(size), offset)
        os.fsync(fd)
        os.close(fd)

    for offset in (0, 3 * MIB, 9 * MIB, 40 * MIB):
        scribble(offset, 256 * KIB)
    base = await snapshot(cloning, source.volume_id, "base")
    for offset in (3 * MIB + 8 * KIB, 9 * MIB, 20 * MIB, 63 * MIB):
        scribble(offset, 4 * KIB)
    new = await snapshot(cloning, source.volume_id, "new")
    await down(cloning, source.volume_id)

    nothing = bytes(64 * MIB)
    old_bytes, new_bytes = (read_image(cloning, each.snapshot_id) for each in (base, new))
    changed = await blocks(cloning, new.snapshot_id, base.snapshot_id)
    assert covered(changed) == differing_blocks(old_bytes, new_bytes)
    assert len(covered(changed)) == 4
    allocated = await blocks(cloning, new.snapshot_id)
    assert covered(allocated) >= differing_blocks(nothing, new_bytes)
    assert len(covered(allocated)) < 1024
    assert await blocks(cloning, new.snapshot_id, new.snapshot_id) == []

    single = await blocks(cloning, new.snapshot_id, base.snapshot_id, count=1)
    assert [len(piece) for piece in single] == [1] * len(single)
    flat = [each for piece in single for each in piece]
    assert flat == sorted(flat)
    assert flat == [each for piece in changed for each in piece]
    rest = await blocks(cloning, new.snapshot_id, base.snapshot_id, start=10 * MIB)
    assert covered(rest) == {n for n in covered(changed) if n >= 10 * MIB}
    assert await blocks(cloning, new.snapshot_id, start=64 * MIB) == []
    for start in (-1, 64 * MIB + 1):
        with raised("OffsetPastEnd"):
            await blocks(cloning, new.snapshot_id, start=start)
    with raised("NegativeMaxResults"):
        await blocks(cloning, new.snapshot_id, count=-1)
    with raised("SnapshotNotFound"):
        await blocks(cloning, "snap-none")


async def test_changed_blocks_of_snapshots_of_two_volumes_are_refused(cloning: Bench) -> None:
    one, two = await cloning.create("one"), await cloning.create("two")
    first = await snapshot(cloning, one.volume_id, "a")
    second = await snapshot(cloning, two.volume_id, "b")
    with raised("UnrelatedSnapshots"):
        await blocks(cloning, first.snapshot_id, second.snapshot_id)


async def test_changed_blocks_on_ext4_are_unsupported_and_allocated_ones_known(
    copying: Bench,
) -> None:
    source = await copying.create("source")
    target = await up(copying, source.volume_id)
    write(target, "file", os.urandom(MIB))
    base = await snapshot(copying, source.volume_id, "base")
    new = await snapshot(copying, source.volume_id, "new")
    await down(copying, source.volume_id)
    image = read_image(copying, new.snapshot_id)
    allocated = covered(await blocks(copying, new.snapshot_id))
    assert allocated >= differing_blocks(bytes(len(image)), image)
    with pytest.raises(protocol.NoChangeTracking):
        await blocks(copying, new.snapshot_id, base.snapshot_id)
