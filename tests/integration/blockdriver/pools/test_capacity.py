"""Capacity: of a full pool, and for a snapshot's copy; snapshots: topology, records, changed blocks."""

import errno
import fcntl
import itertools
import os
import random
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from crust.blockdriver.controller import topology
from crust.blockdriver.engines import protocol
from crust.blockdriver.engines.files import own_blocks
from crust.blockdriver.engines.files.provisioning import FileProvisioning, NewFileSnapshotSet
from crust.blockdriver.host import btrfs, extents
from crust.blockdriver.services import snapshots
from crust.core import errors
from crust.host import answers
from crust.host.files.durable import Place
from crust.wire.csi.v1 import csi_pb2
from tests.integration.blockdriver.conftest import benches_on
from tests.support.drivers.block_driver import MIB, Bench, block, caller
from tests.support.raised import raised
from tests.support.records import pool_layout
from tests.support.records.copies import (
    blocks,
    covered,
    differing_blocks,
    down,
    in_use,
    made_of,
    read_image,
    up,
    write,
)

pytestmark = pytest.mark.root


small = benches_on("ext4", "xfs", size=512 * MIB)
shared = benches_on("ext4", "xfs", "btrfs", size=1024 * MIB)
by_reference = benches_on("xfs", "btrfs", size=1024 * MIB)
on_btrfs = benches_on("btrfs")
reserving = benches_on("ext4", "xfs", "btrfs", size=320 * MIB)


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


async def test_capacity_counts_blocks_that_clones_share_once(shared: Bench) -> None:
    """Else other files vanish from the sum at a restart, and their bytes are promised to volumes."""
    (shared.root / "others").write_bytes(os.urandom(100 * MIB))
    shared.restart()
    source, target = await in_use(shared, "source", size=128 * MIB)
    write(target, "file", os.urandom(100 * MIB))
    await down(shared, source)
    await made_of(shared, "clone", volume_id=source)
    await shared.co.snapshot(source)
    before = await shared.co.capacity()
    shared.restart()
    assert abs(before - await shared.co.capacity()) <= 4 * MIB


@pytest.mark.parametrize(
    ("name", "value"),
    [("_PLACE_UNKNOWN", -1), ("_MOST_PARTS", 1)],
    ids=["compressed", "many parts"],
)
async def test_capacity_without_places_of_blocks_is_no_larger(
    shared: Bench, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    """Blocks that are not seen count as others', and each block of a snapshot as its own."""
    (shared.root / "others").write_bytes(os.urandom(100 * MIB))
    source, target = await in_use(shared, "source", size=128 * MIB)
    write(target, "file", os.urandom(100 * MIB))
    await down(shared, source)
    await made_of(shared, "clone", volume_id=source)
    await shared.co.snapshot(source)
    seen = await shared.co.capacity()
    with monkeypatch.context() as patched:
        patched.setattr(extents, name, value)
        shared.restart()
        assert await shared.co.capacity() <= seen
    shared.restart()
    assert abs(await shared.co.capacity() - seen) <= 4 * MIB


async def test_capacity_beside_an_unseen_snapshot_is_no_larger(
    shared: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may share any volume's blocks, which that volume would need anew."""
    source, target = await in_use(shared, "source", size=128 * MIB)
    write(target, "file", os.urandom(100 * MIB))
    await down(shared, source)
    await shared.co.snapshot(source)
    seen, look_at = await shared.co.capacity(), own_blocks._look_at

    def hide_snapshots(path: Place, *, is_snapshot: bool = False) -> object:
        if is_snapshot:
            raise answers.NotSeen(f"cannot see {path}")
        return look_at(path)

    with monkeypatch.context() as patched:
        patched.setattr(own_blocks, "_look_at", hide_snapshots)
        shared.restart()
        assert await shared.co.capacity() <= seen
        clone = await made_of(shared, "clone", volume_id=source)
    await shared.co.delete(clone.volume_id)
    assert abs(await shared.co.capacity() - seen) <= 4 * MIB


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


async def filled(bench: Bench, *, leave: int) -> tuple[str, str]:
    """A volume with 64 MiB of data, mounted, in a pool with all but `leave` bytes provisioned."""
    source, target = await in_use(bench, "source", size=128 * MIB)
    write(target, "file", b"x" * 64 * MIB)
    await down(bench, source)
    await bench.create("other", size=await bench.co.capacity() - leave)
    return source, await up(bench, source)


async def test_snapshot_does_not_use_reserved_capacity(small: Bench) -> None:
    volume_id, _ = await filled(small, leave=16 * MIB)
    with raised("OutOfCapacity"):
        await small.co.snapshot(volume_id)
    with raised("OutOfCapacity"):
        await small.co.group(volume_id)
    check_no_rest(small)
    await down(small, volume_id)


def check_no_rest(bench: Bench) -> None:
    folders = ("state/snapshots", "run/freezes")
    assert [path for folder in folders for path in (bench.root / folder).iterdir()] == []


async def test_snapshot_counts_what_its_freeze_writes(shared: Bench) -> None:
    """The filesystem's page cache is no block of the image before the freeze."""
    source, target = await in_use(shared, "source", size=128 * MIB)
    await shared.create("other", size=await shared.co.capacity() - 48 * MIB)
    Path(target, "file").write_bytes(os.urandom(64 * MIB))
    with raised("OutOfCapacity"):
        await shared.co.snapshot(source)
    check_no_rest(shared)
    write(target, "file", b"the filesystem is thawed")
    await down(shared, source)


async def test_each_volume_can_be_filled_after_snapshots(by_reference: Bench) -> None:
    """Until no snapshot fits any more; then the pool's last byte is promised, and every volume is written full."""
    bench = by_reference
    ids = [(await in_use(bench, name, block(), size=160 * MIB))[0] for name in ("a", "b")]
    targets = [bench.target(volume_id) for volume_id in ids]
    for target in targets:
        write_all(target, 64 * MIB)
    names = itertools.count()
    with raised("OutOfCapacity"):
        while True:
            await bench.co.snapshot(ids[0], f"s{next(names)}")
            write_all(targets[0], 64 * MIB)
    for _ in range(1000):  # until the filesystem has freed the refused copy
        os.sync()
        if left := await bench.co.capacity():
            break
    assert 0 < left < 64 * MIB
    last, target = await in_use(bench, "last", block(), size=left)
    for volume_target in (*targets, target):
        write_all(volume_target, 0)
    for volume_id in (*ids, last):
        await down(bench, volume_id)


async def test_snapshots_of_an_unchanged_volume_set_its_blocks_aside_once(
    by_reference: Bench,
) -> None:
    """And as long as one of them is there."""
    bench = by_reference
    source, target = await in_use(bench, "source", block(), size=160 * MIB)
    write_all(target, 96 * MIB)
    before, taken = await bench.co.capacity(), []

    async def check_set_aside(size: int) -> None:
        """Once the filesystem has freed what was deleted: xfs and btrfs do it later."""
        for _ in range(1000):
            os.sync()
            set_aside = before - await bench.co.capacity()
            if abs(set_aside - size) <= METADATA_BYTES:
                return
        pytest.fail(f"{set_aside / MIB} MiB are set aside, not {size / MIB}")

    for number in range(8):
        taken.append((await bench.co.snapshot(source, f"s{number}")).snapshot_id)
    await check_set_aside(96 * MIB)
    write_all(target, 32 * MIB)
    later = await bench.co.snapshot(source, "later")
    await check_set_aside(128 * MIB)
    for snapshot_id in taken:
        await bench.co.delete_snapshot(snapshot_id)
    await check_set_aside(96 * MIB)
    await bench.co.delete_snapshot(later.snapshot_id)
    await bench.co.snapshot(source, "after the last one was deleted")
    await check_set_aside(96 * MIB)
    await down(bench, source)


async def test_capacity_on_btrfs_commits_each_deletion_once(
    on_btrfs: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the kernel takes what the deleted file shared for shared, and FIEMAP does not."""
    commit, commits = btrfs.commit, []

    def counted(directory: Place) -> None:
        commits.append(directory)
        commit(directory)

    source = await on_btrfs.create("source", size=64 * MIB)
    taken = await on_btrfs.co.snapshot(source.volume_id)
    await on_btrfs.co.capacity()
    monkeypatch.setattr(btrfs, "commit", counted)
    await on_btrfs.co.delete_snapshot(taken.snapshot_id)
    for _ in range(2):
        await on_btrfs.co.capacity()
        assert len(commits) == 1


METADATA_BYTES = 16 * MIB
"""What btrfs may take for its trees meanwhile."""


def write_all(device: str, size_bytes: int) -> None:
    """Other bytes in each block, up to `size_bytes` or the device's end. Raises `OSError` where the disk is full."""
    data = os.urandom(MIB)
    fd = os.open(device, os.O_WRONLY | os.O_DSYNC)
    try:
        end = size_bytes or os.lseek(fd, 0, os.SEEK_END)
        for offset in range(0, end, MIB):
            os.pwrite(fd, data[: end - offset], offset)
    finally:
        os.close(fd)


async def test_capacity_is_reserved_before_a_copy_starts(
    small: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_id, _ = await filled(small, leave=100 * MIB)
    take, before = NewFileSnapshotSet.take, await small.co.capacity()
    meanwhile: list[int] = []

    def looking(self: NewFileSnapshotSet, image: protocol.Image) -> None:
        meanwhile.append(small.driver.stores.capacity.available_bytes())
        take(self, image)

    monkeypatch.setattr(NewFileSnapshotSet, "take", looking)
    await small.co.snapshot(volume_id)
    assert before - meanwhile[0] >= 64 * MIB
    after = await small.co.capacity()
    assert before - after >= 64 * MIB, "what the source may overwrite is no longer free"
    await down(small, volume_id)


async def test_snapshot_in_csi_1_13_has_its_topology(tmp_path: Path) -> None:
    types = csi_pb2.PluginCapability.Service
    for profile in ("1.12", "1.13"):
        root = tmp_path / profile
        root.mkdir()
        bench = Bench(root, profile="1.13" if profile == "1.13" else "1.12")
        reported = await bench.driver.identity.GetPluginCapabilities(
            csi_pb2.GetPluginCapabilitiesRequest(), caller()
        )
        services = {capability.service.type for capability in reported.capabilities}
        assert (types.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS in services) == (profile == "1.13")
        source = await bench.create("source")
        taken = await bench.co.snapshot(source.volume_id)
        members = (await bench.co.group(source.volume_id)).snapshots
        looked = await bench.driver.controller.GetSnapshot(
            csi_pb2.GetSnapshotRequest(snapshot_id=taken.snapshot_id), caller()
        )
        listed = await bench.co.snapshots()
        every = [taken, *members, looked.snapshot, *listed.values()]
        here = [{topology.KEY: topology.value_of("node-1")}] if profile == "1.13" else []
        for snapshot in every:
            assert [dict(place.segments) for place in snapshot.accessible_topology] == here


async def test_snapshot_required_in_another_topology_is_refused(bench: Bench) -> None:
    source = await bench.create("source")
    request = csi_pb2.CreateSnapshotRequest(source_volume_id=source.volume_id, name="s")
    request.accessibility_requirements.requisite.add(segments={topology.KEY: "node-2"})
    create = bench.driver.controller.CreateSnapshot
    with pytest.raises(topology.TopologyNotAccessible, match="no snapshot"):
        await create(request, caller())
    request.accessibility_requirements.requisite.add(segments={topology.KEY: "node-1"})
    assert (await create(request, caller())).snapshot.ready_to_use


async def test_snapshot_or_image_without_the_other_is_reported_and_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, profile="1.13")
    source = await bench.create("source")
    kept, lost = (
        await bench.co.snapshot(source.volume_id),
        await bench.co.snapshot(source.volume_id, "b"),
    )
    await bench.co.group(source.volume_id)
    pool = tmp_path / "state"
    orphan = pool_layout.snapshot_image(pool, bench.ids.snapshot_id("nobody"))
    orphan.parent.mkdir()
    pool_layout.snapshot_image(pool, lost.snapshot_id).rename(orphan)
    bench.restart()
    health = await bench.driver.node.NodeGetStorageHealth(
        csi_pb2.NodeGetStorageHealthRequest(), caller()
    )
    reported = {finding.reason: finding.message for finding in health.backend_health}
    assert set(reported) == {"SnapshotImageMissing", "SnapshotRecordMissing"}
    assert lost.snapshot_id in reported["SnapshotImageMissing"]
    assert orphan.stem in reported["SnapshotRecordMissing"]
    assert orphan.exists()
    assert {kept.snapshot_id, lost.snapshot_id} < set(await bench.co.snapshots())


KIB = 1024
_BLKDISCARD = 0x1277


class RandomWriter:
    """Does things to a raw device, with chances of its own."""

    def __init__(self, seed: int, path: str) -> None:
        self._chance = random.Random(seed)
        self._fd = os.open(path, os.O_RDWR)

    def close(self) -> None:
        os.close(self._fd)

    def act(self) -> None:
        """A handful of writes, unaligned ones too, some of them zeros or what is there already; and discards."""
        size = os.lseek(self._fd, 0, os.SEEK_END)
        for _ in range(self._chance.randrange(1, 20)):
            self._chance.choice((self._write, self._write_again, self._zero, self._discard))(size)
        if self._chance.random() < 0.5:
            os.fsync(self._fd)

    def _place(self, size: int, step: int) -> tuple[int, int]:
        offset = self._chance.randrange(size // step) * step
        longest = self._chance.choice((step, 64 * KIB, MIB))
        return offset, min(self._chance.randrange(1, longest // step + 1) * step, size - offset)

    def _write(self, size: int) -> None:
        offset, length = self._place(size, 512)
        os.pwrite(self._fd, self._chance.randbytes(length), offset)

    def _write_again(self, size: int) -> None:
        offset, length = self._place(size, 512)
        os.pwrite(self._fd, os.pread(self._fd, length, offset), offset)

    def _zero(self, size: int) -> None:
        offset, length = self._place(size, 512)
        os.pwrite(self._fd, bytes(length), offset)

    def _discard(self, size: int) -> None:
        try:
            fcntl.ioctl(self._fd, _BLKDISCARD, struct.pack("=QQ", *self._place(size, 4 * KIB)))
        except OSError as err:
            if err.errno != errno.EOPNOTSUPP:  # as on btrfs
                raise


async def check(bench: Bench, taken: list[str]) -> None:
    """Every list of every snapshot, against the bytes."""
    images = {snapshot_id: read_image(bench, snapshot_id) for snapshot_id in taken}
    for snapshot_id, data in images.items():
        listed = covered(await blocks(bench, snapshot_id))
        assert listed >= differing_blocks(bytes(len(data)), data)
    for base, target in itertools.permutations(taken, 2):
        old, new = images[base], images[target]
        padded = old.ljust(len(new), b"\0")[: len(new)]
        listed = covered(await blocks(bench, target, base))
        assert listed >= differing_blocks(padded, new), (base, target)


@pytest.mark.parametrize("seed", range(3))
async def test_changed_blocks_of_a_raw_device_are_exact(cloning: Bench, seed: int) -> None:
    source, target = await in_use(cloning, "source", block(), size=16 * MIB)
    scribbler, taken = RandomWriter(seed, target), []
    try:
        for number in range(6):
            scribbler.act()
            taken.append((await cloning.co.snapshot(source, f"s{number}")).snapshot_id)
            if number % 2:
                await cloning.grow(source, (16 + 4 * number) * MIB + 512 * number)
            if number == 3:  # blocks of a deleted snapshot are reused
                await cloning.co.delete_snapshot(taken.pop(1))
    finally:
        scribbler.close()
    await check(cloning, taken)


async def test_changed_blocks_beyond_one_fiemap_call_are_complete(
    cloning: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await in_use(cloning, "source", block(), size=16 * MIB)
    base = await cloning.co.snapshot(source, "base")
    wanted = set(range(0, 16 * MIB, 8 * KIB))
    fd = os.open(target, os.O_RDWR)
    for offset in sorted(wanted, key=lambda place: place % (64 * KIB)):  # never two neighbours
        os.pwrite(fd, b"x" * 4 * KIB, offset)
        if offset >= 16 * MIB - 64 * KIB:
            os.fsync(fd)
    os.close(fd)
    new = await cloning.co.snapshot(source, "new")
    assert covered(await blocks(cloning, new.snapshot_id, base.snapshot_id)) == wanted
    assert covered(await blocks(cloning, new.snapshot_id)) == wanted
    await _check_parts(cloning, base.snapshot_id, new.snapshot_id, monkeypatch)
    await cloning.co.delete_snapshot(new.snapshot_id)


async def _check_parts(
    bench: Bench, base: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that is read in many parts is the same, whatever is in a message."""
    for pair in ((target, base), (target, "")):
        whole = list(itertools.chain.from_iterable(await blocks(bench, *pair)))
        with monkeypatch.context() as patched:
            patched.setattr(snapshots, "PART", 100)
            pieces = await blocks(bench, *pair, count=30)
        assert {len(piece) for piece in pieces[:-1]} == {30}
        assert list(itertools.chain.from_iterable(pieces)) == whole


async def test_block_list_holds_one_part_and_ends_with_its_snapshot(
    copying: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "PART", 3)
    source, target = await in_use(copying, "source", block(), size=16 * MIB)
    with open(target, "r+b") as device:
        for number in range(9):
            device.seek(number * MIB)
            device.write(b"data")
    await down(copying, source)
    snapshot = await copying.co.snapshot(source)
    read = 0

    def counted(regions: Iterable[extents.Extent]) -> Iterator[extents.Extent]:
        nonlocal read
        for region in regions:
            read += 1
            yield region

    real = FileProvisioning.allocated
    monkeypatch.setattr(FileProvisioning, "allocated", lambda *of: counted(real(*of)))
    request = csi_pb2.GetMetadataAllocatedRequest(snapshot_id=snapshot.snapshot_id, max_results=3)
    messages = copying.driver.controller.GetMetadataAllocated(request, caller())
    assert len((await anext(messages)).block_metadata) == 3
    assert read == 3
    await copying.co.delete_snapshot(snapshot.snapshot_id)
    with raised("SnapshotNotFound"):
        await anext(messages)


async def test_changed_blocks_on_ext4_are_unsupported_and_allocated_ones_known(
    copying: Bench,
) -> None:
    source, target = await in_use(copying, "source")
    write(target, "file", os.urandom(MIB))
    base = await copying.co.snapshot(source, "base")
    new = await copying.co.snapshot(source, "new")
    await down(copying, source)
    image = read_image(copying, new.snapshot_id)
    allocated = covered(await blocks(copying, new.snapshot_id))
    assert allocated >= differing_blocks(bytes(len(image)), image)
    with pytest.raises(protocol.NoChangeTracking):
        await blocks(copying, new.snapshot_id, base.snapshot_id)
    with raised("NegativeMaxResults"):
        await blocks(copying, new.snapshot_id, count=-1)
