"""Snapshots, restores, clones and groups on every kind of pool, verified byte by byte."""

import asyncio
import hashlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust import errors, operations
from crust.blockdriver.controller import create_volume
from crust.blockdriver.engines import protocol
from crust.blockdriver.node import guests
from crust.blockdriver.records import volume_records
from crust.blockdriver.services import group_controller, snapshot_calls, snapshot_metadata
from crust.blockdriver.snapshots import (
    changed_blocks,
    content_source,
    group_snapshot,
    host_freeze,
    quiesce,
    take_snapshot,
)
from crust.host.block import devices
from crust.host.filesystems import fsfreeze, growth
from crust.host.mounts import mountinfo
from crust.host.process import boot
from crust.rpc import csi, limits
from crust.wire.csi.v1 import csi_pb2
from tests.support.block_driver import MIB, Bench, block, caller, mount
from tests.support.pools import bench_on

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

KIB = 1024


@pytest.fixture(params=["ext4", "xfs", "btrfs"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with bench_on(request.param, tmp_path) as bench:
        yield bench


@pytest.fixture(params=["xfs", "btrfs"])
def cloning(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with bench_on(request.param, tmp_path) as bench:
        yield bench


@pytest.fixture
def copying(tmp_path: Path) -> Iterator[Bench]:
    with bench_on("ext4", tmp_path) as bench:
        yield bench


async def snapshot(bench: Bench, volume_id: str, name: str = "snap") -> csi_pb2.Snapshot:
    request = csi_pb2.CreateSnapshotRequest(source_volume_id=volume_id, name=name)
    return (await bench.driver.controller.CreateSnapshot(request, caller())).snapshot


def records(bench: Bench) -> set[str]:
    """The volumes that are on record, whatever their phase."""
    return {path.stem for path in (bench.root / "state" / "records").iterdir()}


async def drop(bench: Bench, snapshot_id: str) -> None:
    request = csi_pb2.DeleteSnapshotRequest(snapshot_id=snapshot_id)
    await bench.driver.controller.DeleteSnapshot(request, caller())


async def made_of(
    bench: Bench,
    name: str,
    *,
    snapshot_id: str = "",
    volume_id: str = "",
    size: int = 0,
    fs_type: str = "ext4",
    raw: bool = False,
) -> csi_pb2.Volume:
    request = csi_pb2.CreateVolumeRequest(
        name=name,
        volume_capabilities=[csi.capability_to_wire(block() if raw else mount(fs_type))],
        capacity_range=csi_pb2.CapacityRange(required_bytes=size),
    )
    if snapshot_id:
        request.volume_content_source.snapshot.snapshot_id = snapshot_id
    else:
        request.volume_content_source.volume.volume_id = volume_id
    return (await bench.driver.controller.CreateVolume(request, caller())).volume


async def up(bench: Bench, volume_id: str, fs_type: str = "ext4", *, raw: bool = False) -> str:
    capability = block() if raw else mount(fs_type)
    target = bench.target(volume_id)
    await bench.stage(volume_id, capability)
    await bench.publish(volume_id, target, capability)
    return target


def pool_type(bench: Bench) -> str:
    """The filesystem of the pool."""
    mount = mountinfo.at(str(bench.root))
    assert mount is not None
    return mount.fs_type


async def down(bench: Bench, volume_id: str) -> None:
    await bench.unpublish(volume_id, bench.target(volume_id))
    await bench.unstage(volume_id)


def write(directory: str, name: str, data: bytes) -> None:
    """Without a sync: a snapshot must not need one."""
    with open(os.path.join(directory, name), "wb") as file:
        file.write(data)


def digest(directory: str, name: str) -> str:
    with open(os.path.join(directory, name), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def unmount_lazily(target: str) -> None:
    subprocess.run(["umount", "--lazy", target], check=True)


def is_frozen(target: str) -> bool:
    try:
        fsfreeze.freeze(target)
    except errors.NotReady:
        return True
    fsfreeze.thaw(target)
    return False


@pytest.mark.parametrize(
    ("fs_type", "size"), [("ext4", 64 * MIB), ("xfs", 320 * MIB), ("btrfs", 256 * MIB)]
)
async def test_restored_volume_has_the_point_in_time_files_and_mounts_beside_its_source(
    pool: Bench, fs_type: str, size: int
) -> None:
    source = await pool.create("source", mount(fs_type), size=size)
    target = await up(pool, source.volume_id, fs_type)
    data = os.urandom(8 * MIB)
    write(target, "kept", data)
    taken = await snapshot(pool, source.volume_id)
    assert not is_frozen(target)
    write(target, "kept", b"changed")
    write(target, "later", b"later")

    restored = await made_of(pool, "restored", snapshot_id=taken.snapshot_id, fs_type=fs_type)
    assert restored.content_source.snapshot.snapshot_id == taken.snapshot_id
    assert restored.capacity_bytes == taken.size_bytes == size
    other = await up(pool, restored.volume_id, fs_type)
    assert digest(other, "kept") == hashlib.sha256(data).hexdigest()
    assert not os.path.exists(os.path.join(other, "later"))
    write(other, "kept", b"mine")
    with open(os.path.join(target, "kept"), "rb") as file:
        assert file.read() == b"changed"
    await down(pool, restored.volume_id)
    await down(pool, source.volume_id)
    await pool.delete(source.volume_id)

    again = await made_of(pool, "again", snapshot_id=taken.snapshot_id, fs_type=fs_type)
    third = await up(pool, again.volume_id, fs_type)
    assert digest(third, "kept") == hashlib.sha256(data).hexdigest()
    await down(pool, again.volume_id)
    await drop(pool, taken.snapshot_id)
    await drop(pool, taken.snapshot_id)


@pytest.mark.parametrize(
    ("fs_type", "size"), [("ext4", 64 * MIB), ("xfs", 320 * MIB), ("btrfs", 256 * MIB)]
)
async def test_clone_of_a_mounted_volume_can_be_larger_and_is_independent(
    pool: Bench, fs_type: str, size: int
) -> None:
    source = await pool.create("source", mount(fs_type), size=size)
    target = await up(pool, source.volume_id, fs_type)
    data = os.urandom(4 * MIB)
    write(target, "kept", data)
    clone = await made_of(pool, "clone", volume_id=source.volume_id, size=2 * size, fs_type=fs_type)
    assert clone.content_source.volume.volume_id == source.volume_id
    other = await up(pool, clone.volume_id, fs_type)
    assert digest(other, "kept") == hashlib.sha256(data).hexdigest()
    stats = await pool.stats(clone.volume_id, other)
    grows = not growth.obstacle(
        fs_type
    )  # root of a container may not grow an ext4: then it is reported
    assert (stats.usage[0].total > 1.5 * size) == grows
    assert stats.condition is not None
    assert stats.condition.abnormal == (not grows)
    second = await made_of(pool, "second", volume_id=clone.volume_id, fs_type=fs_type)
    third = await up(pool, second.volume_id, fs_type)
    assert digest(third, "kept") == hashlib.sha256(data).hexdigest()
    for volume_id in (second.volume_id, clone.volume_id, source.volume_id):
        await down(pool, volume_id)
        await pool.delete(volume_id)


async def test_snapshot_of_a_raw_volume_includes_unwritten_page_cache(
    cloning: Bench,
) -> None:
    source = await cloning.create("source", block())
    target = await up(cloning, source.volume_id, raw=True)
    fd = os.open(target, os.O_WRONLY)
    os.pwrite(fd, b"only in the page cache", 5 * MIB)
    taken = await snapshot(cloning, source.volume_id)
    os.close(fd)
    restored = await made_of(cloning, "restored", snapshot_id=taken.snapshot_id, raw=True)
    other = await up(cloning, restored.volume_id, raw=True)
    with open(other, "rb") as file:
        file.seek(5 * MIB)
        assert file.read(22) == b"only in the page cache"
    await down(cloning, restored.volume_id)
    await down(cloning, source.volume_id)


async def test_snapshot_of_a_raw_volume_in_use_is_refused_without_reflinks(
    copying: Bench,
) -> None:
    source = await copying.create("source", block())
    await up(copying, source.volume_id, raw=True)
    with pytest.raises(quiesce.RawDeviceInUse):
        await snapshot(copying, source.volume_id)
    with pytest.raises(quiesce.RawDeviceInUse):
        await made_of(copying, "clone", volume_id=source.volume_id, raw=True)
    assert records(copying) == {source.volume_id}, "a refused clone keeps its reservation"
    await down(copying, source.volume_id)
    await snapshot(copying, source.volume_id)


async def test_snapshot_of_a_volume_in_an_unreachable_guest_is_refused(cloning: Bench) -> None:
    source = await cloning.create("source")
    await cloning.stage(source.volume_id)
    await cloning.publish(source.volume_id, cloning.target("pod"), deferred=True)
    with pytest.raises(guests.NoRuntimeSocket):
        await snapshot(cloning, source.volume_id)
    with pytest.raises(guests.NoRuntimeSocket):
        await made_of(cloning, "clone", volume_id=source.volume_id)
    assert records(cloning) == {source.volume_id}
    await cloning.unpublish(source.volume_id, cloning.target("pod"))
    await snapshot(cloning, source.volume_id)


async def test_copy_on_ext4_keeps_the_holes(copying: Bench) -> None:
    source = await copying.create("source", size=1024 * MIB)
    await up(copying, source.volume_id)
    taken = await snapshot(copying, source.volume_id)
    images = copying.root / "state" / "images"
    copy = images / f"{taken.snapshot_id}.snap"
    assert copy.stat().st_size == 1024 * MIB
    assert copy.stat().st_blocks * 512 < 128 * MIB
    assert copy.stat().st_mode & 0o777 == 0o400


async def test_attach_on_btrfs_is_buffered_so_that_clones_have_few_extents(
    pool: Bench,
) -> None:
    """With direct I/O every request left an extent there, and a clone of 2 GiB took four times that of 100 MiB."""
    volume = await pool.create("one", block())
    await up(pool, volume.volume_id, raw=True)
    attachment = pool.driver.stores.access.attached(pool.ids.volume_id("one"))
    assert attachment is not None
    name = os.path.basename(attachment.host_device.path)
    on_btrfs = pool_type(pool) == "btrfs"
    assert Path(f"/sys/block/{name}/loop/dio").read_text().strip() == ("0" if on_btrfs else "1")
    await down(pool, volume.volume_id)


async def test_snapshot_repeated_returns_the_same_and_errors_follow_csi(
    cloning: Bench,
) -> None:
    one, two = await cloning.create("one"), await cloning.create("two")
    taken = await snapshot(cloning, one.volume_id)
    again = await snapshot(cloning, one.volume_id)
    assert again == taken
    assert taken.ready_to_use
    assert taken.creation_time.seconds > 0
    with pytest.raises(take_snapshot.SnapshotNameTaken):
        await snapshot(cloning, two.volume_id)
    with pytest.raises(volume_records.VolumeNotFound):
        await snapshot(cloning, cloning.ids.volume_id("none"), "other")
    with pytest.raises(take_snapshot.SnapshotNotFound):
        await made_of(cloning, "a", snapshot_id="snap-none")
    with pytest.raises(volume_records.VolumeNotFound):
        await made_of(cloning, "a", volume_id="vol-none")
    with pytest.raises(content_source.SmallerThanSource):
        await made_of(cloning, "a", snapshot_id=taken.snapshot_id, size=MIB)
    with pytest.raises(volume_records.VolumeNotFound):
        await made_of(cloning, "a", volume_id=cloning.ids.volume_id("a"))
    made = await made_of(cloning, "a", snapshot_id=taken.snapshot_id)
    assert await made_of(cloning, "a", snapshot_id=taken.snapshot_id) == made
    with pytest.raises(create_volume.VolumeExistsDifferently):
        await made_of(cloning, "a", volume_id=one.volume_id)
    with pytest.raises(create_volume.VolumeExistsDifferently):
        await cloning.create("a")
    await drop(cloning, taken.snapshot_id)
    assert await made_of(cloning, "a", snapshot_id=taken.snapshot_id) == made
    with pytest.raises(snapshot_calls.UnknownSnapshotParameter):
        await cloning.driver.controller.CreateSnapshot(
            csi_pb2.CreateSnapshotRequest(
                source_volume_id=one.volume_id, name="p", parameters={"x": "y"}
            ),
            caller(),
        )


async def test_create_from_a_source_with_another_filesystem_is_refused(cloning: Bench) -> None:
    source = await cloning.create("source", size=320 * MIB)
    await up(cloning, source.volume_id)
    taken = await snapshot(cloning, source.volume_id)
    with pytest.raises(content_source.SourceFilesystemDiffers):
        await made_of(cloning, "a", snapshot_id=taken.snapshot_id, fs_type="xfs")
    made = await made_of(cloning, "b", snapshot_id=taken.snapshot_id, fs_type="")
    await up(cloning, made.volume_id, "")
    await down(cloning, made.volume_id)
    await down(cloning, source.volume_id)


async def test_list_snapshots_pages_survive_changes(cloning: Bench) -> None:
    one, two = await cloning.create("one"), await cloning.create("two")
    taken = [await snapshot(cloning, one.volume_id, f"s{n}") for n in range(5)]
    taken.append(await snapshot(cloning, two.volume_id, "other"))
    ids = sorted(each.snapshot_id for each in taken)

    async def listed(**fields: object) -> csi_pb2.ListSnapshotsResponse:
        request = csi_pb2.ListSnapshotsRequest(**fields)  # type: ignore[arg-type]
        return await cloning.driver.controller.ListSnapshots(request, caller())

    first = await listed(max_entries=2)
    assert [each.snapshot.snapshot_id for each in first.entries] == ids[:2]
    await drop(cloning, ids[1])
    second = await listed(max_entries=4, starting_token=first.next_token)
    assert [each.snapshot.snapshot_id for each in second.entries] == ids[2:]
    assert second.next_token == ""
    filtered = await listed(source_volume_id=two.volume_id)
    assert [each.snapshot.source_volume_id for each in filtered.entries] == [two.volume_id]
    assert len((await listed(snapshot_id=ids[0])).entries) == 1
    assert len((await listed(snapshot_id="snap-none")).entries) == 0
    with pytest.raises(limits.InvalidStartingToken):
        await listed(starting_token="nonsense")
    with pytest.raises(limits.NegativeMaxEntries):
        await listed(max_entries=-1)
    got = await cloning.driver.controller.GetSnapshot(
        csi_pb2.GetSnapshotRequest(snapshot_id=ids[0]), caller()
    )
    assert got.snapshot.snapshot_id == ids[0]
    with pytest.raises(take_snapshot.SnapshotNotFound):
        await cloning.driver.controller.GetSnapshot(
            csi_pb2.GetSnapshotRequest(snapshot_id=ids[1]), caller()
        )
    await asyncio.to_thread(cloning.restart)
    assert len((await listed()).entries) == 5


async def test_snapshot_during_another_operation_of_the_volume_is_aborted(cloning: Bench) -> None:
    source = await cloning.create("source")
    running = cloning.driver.operations
    key = cloning.driver.controller._key(cloning.ids.volume_id("source"))
    with running.shared(key), pytest.raises(operations.OperationInProgress):
        await snapshot(cloning, source.volume_id)
    await snapshot(cloning, source.volume_id)


async def test_start_thaws_a_filesystem_left_frozen(copying: Bench) -> None:
    source = await copying.create("source")
    target = await up(copying, source.volume_id)
    attachment = copying.driver.stores.access.attached(copying.ids.volume_id("source"))
    assert attachment is not None
    entry = copying.root / "run" / "freezes" / source.volume_id
    entry.write_text(f"{boot.boot_id()} {attachment.host_device.identity}\n")
    entry.chmod(0o600)
    fsfreeze.freeze(target)
    await asyncio.to_thread(copying.restart)
    assert not is_frozen(target)
    assert not entry.exists()
    await down(copying, source.volume_id)


@pytest.mark.parametrize(
    ("fs_type", "size"), [("ext4", 64 * MIB), ("xfs", 320 * MIB), ("btrfs", 256 * MIB)]
)
async def test_start_thaws_a_frozen_filesystem_that_was_unmounted(
    copying: Bench, fs_type: str, size: int
) -> None:
    """It was unmounted lazily: it still has the device, and no path leads to it."""
    source = await copying.create("source", mount(fs_type), size=size)
    target = await up(copying, source.volume_id, fs_type)
    attachment = copying.driver.stores.access.attached(copying.ids.volume_id("source"))
    assert attachment is not None
    entry = copying.root / "run" / "freezes" / source.volume_id
    entry.write_text(f"{boot.boot_id()} {attachment.host_device.identity}\n")
    entry.chmod(0o600)
    fsfreeze.freeze(target)
    unmount_lazily(target)
    with pytest.raises(devices.DeviceInUse):
        os.close(devices.open_exclusive(attachment.host_device.path))
    await asyncio.to_thread(copying.restart)
    assert not entry.exists()
    os.close(devices.open_exclusive(attachment.host_device.path))
    assert await up(copying, source.volume_id, fs_type) == target
    write(target, "after", b"x")
    await down(copying, source.volume_id)


async def test_start_drops_a_freeze_of_a_removed_volume(copying: Bench) -> None:
    source = await copying.create("source")
    await up(copying, source.volume_id)
    attachment = copying.driver.stores.access.attached(copying.ids.volume_id("source"))
    assert attachment is not None
    entry = copying.root / "run" / "freezes" / source.volume_id
    await copying.unpublish(source.volume_id, copying.target(source.volume_id))
    for absent in (attachment.host_device.identity, "7:1000000@1", "nonsense"):
        entry.write_text(f"{boot.boot_id()} {absent}\n")
        entry.chmod(0o600)
        await asyncio.to_thread(copying.restart)
        assert not entry.exists()
    await copying.unstage(source.volume_id)


async def test_snapshot_that_takes_too_long_is_thawed_and_fails(
    copying: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await copying.create("source")
    target = await up(copying, source.volume_id)
    backend = copying.driver.stores.provisioning
    take = backend.take_snapshot

    def slowly(image: protocol.Image) -> None:
        take(image)
        # A writer waits until the filesystem is thawed, which only the timer does now.
        write(target, "after", b"x")

    monkeypatch.setattr(copying.driver.snapshots.freezer, "_limit_s", 0.2)
    monkeypatch.setattr(backend, "take_snapshot", slowly)
    with pytest.raises(host_freeze.FrozenTooLong):
        await snapshot(copying, source.volume_id)
    assert not is_frozen(target)
    assert copying.driver.snapshots.volume_snapshots.snapshot_records.ready() == []
    assert not list((copying.root / "state" / "images").glob("*.snap"))
    await down(copying, source.volume_id)


async def group(bench: Bench, *volume_ids: str, name: str = "g") -> csi_pb2.VolumeGroupSnapshot:
    request = csi_pb2.CreateVolumeGroupSnapshotRequest(name=name, source_volume_ids=volume_ids)
    answer = await bench.driver.group_controller.CreateVolumeGroupSnapshot(request, caller())
    return answer.group_snapshot


async def test_group_snapshot_freezes_all_members_before_the_first_copy(
    pool: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [await pool.create(name) for name in ("one", "two")]
    targets = [await up(pool, each.volume_id) for each in made]
    data = [os.urandom(MIB) for _ in made]
    for target, content in zip(targets, data, strict=True):
        write(target, "file", content)
    backend = pool.driver.stores.provisioning
    take, seen = backend.take_snapshot, []

    def looking(image: protocol.Image) -> None:
        seen.append([is_frozen(target) for target in targets])
        take(image)

    monkeypatch.setattr(backend, "take_snapshot", looking)
    taken = await group(pool, *(each.volume_id for each in made))
    assert seen == [[True, True], [True, True]]
    assert not any(is_frozen(target) for target in targets)
    assert {each.group_snapshot_id for each in taken.snapshots} == {taken.group_snapshot_id}
    assert await group(pool, *(each.volume_id for each in reversed(made))) == taken
    by_source = {each.source_volume_id: each.snapshot_id for each in taken.snapshots}
    for source, content in zip(made, data, strict=True):
        member = by_source[source.volume_id]
        restored = await made_of(pool, f"r-{member}", snapshot_id=member)
        target = await up(pool, restored.volume_id)
        assert digest(target, "file") == hashlib.sha256(content).hexdigest()
        await down(pool, restored.volume_id)
    for volume in made:
        await down(pool, volume.volume_id)


async def test_group_snapshot_is_deleted_as_one_and_errors_follow_csi(cloning: Bench) -> None:
    made = [await cloning.create(name) for name in ("one", "two", "three")]
    ids = [each.volume_id for each in made]
    taken = await group(cloning, *ids[:2])
    members = [each.snapshot_id for each in taken.snapshots]
    servicer = cloning.driver.group_controller
    with pytest.raises(group_snapshot.GroupNameTaken):
        await group(cloning, *ids)
    with pytest.raises(volume_records.VolumeNotFound):
        await group(cloning, ids[0], cloning.ids.volume_id("none"), name="h")
    with pytest.raises(limits.MissingField):
        await group(cloning, name="h")
    with pytest.raises(group_controller.SameVolumeTwice):
        await group(cloning, ids[0], ids[0], name="h")
    with pytest.raises(take_snapshot.SnapshotBelongsToGroup):
        await drop(cloning, members[0])

    async def get(*named: str) -> csi_pb2.VolumeGroupSnapshot:
        request = csi_pb2.GetVolumeGroupSnapshotRequest(
            group_snapshot_id=taken.group_snapshot_id, snapshot_ids=named
        )
        return (await servicer.GetVolumeGroupSnapshot(request, caller())).group_snapshot

    async def delete(*named: str) -> None:
        request = csi_pb2.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=taken.group_snapshot_id, snapshot_ids=named
        )
        await servicer.DeleteVolumeGroupSnapshot(request, caller())

    await asyncio.to_thread(cloning.restart)
    servicer = cloning.driver.group_controller
    assert await get(*members) == taken
    for call in (get, delete):
        with pytest.raises(group_snapshot.GroupMembersDiffer):
            await call(members[0])
    await delete(*members)
    await delete(*members)
    with pytest.raises(group_snapshot.GroupNotFound):
        await get(*members)
    assert cloning.driver.snapshots.volume_snapshots.snapshot_records.ready() == []
    assert not list((cloning.root / "state" / "images").glob("*.snap"))


async def test_group_with_a_raw_device_in_use_is_point_in_time_with_reflinks(
    cloning: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied last, while the others are frozen."""
    one, two = await cloning.create("one", block()), await cloning.create("two")
    await up(cloning, one.volume_id, raw=True)
    target = await up(cloning, two.volume_id)
    backend = cloning.driver.stores.provisioning
    take, seen = backend.take_snapshot, []

    def looking(image: protocol.Image) -> None:
        seen.append((image.volume_id, is_frozen(target)))
        take(image)

    monkeypatch.setattr(backend, "take_snapshot", looking)
    await group(cloning, one.volume_id, two.volume_id)
    assert seen == [(two.volume_id, True), (one.volume_id, True)]
    for volume in (one, two):
        await down(cloning, volume.volume_id)


async def raw_pair(bench: Bench) -> tuple[list[str], list[str]]:
    made = [await bench.create(name, block()) for name in ("one", "two")]
    ids = sorted(each.volume_id for each in made)
    return ids, [await up(bench, each, raw=True) for each in ids]


def stamp(target: str, text: bytes) -> None:
    fd = os.open(target, os.O_WRONLY)
    os.pwrite(fd, text, MIB)
    os.close(fd)


async def test_group_of_raw_devices_is_copied_again_after_a_write(
    cloning: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, targets = await raw_pair(cloning)
    backend = cloning.driver.stores.provisioning
    take = backend.take_snapshot
    taken: list[str] = []

    def interrupted(image: protocol.Image) -> None:
        if len(taken) == 1:  # between the two copies: the second would have what the first has not
            stamp(targets[0], b"earlier")
            stamp(targets[1], b"later")
        taken.append(image.volume_id)
        take(image)

    monkeypatch.setattr(backend, "take_snapshot", interrupted)
    made = await group(cloning, *ids)
    assert taken == [*ids, *ids]
    by_source = {each.source_volume_id: each.snapshot_id for each in made.snapshots}
    found = [read_image(cloning, by_source[each])[MIB : MIB + 7] for each in ids]
    assert found == [b"earlier", b"later\0\0"]
    for volume_id in ids:
        await down(cloning, volume_id)


async def test_group_of_raw_devices_always_written_to_is_refused(
    cloning: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, targets = await raw_pair(cloning)
    backend = cloning.driver.stores.provisioning
    take, number = backend.take_snapshot, itertools.count()

    def interrupted(image: protocol.Image) -> None:
        take(image)
        stamp(targets[0], b"%d" % next(number))

    with monkeypatch.context() as patched:
        patched.setattr(backend, "take_snapshot", interrupted)
        with pytest.raises(take_snapshot.RawDevicesNeverIdle):
            await group(cloning, *ids)
    assert cloning.driver.snapshots.volume_snapshots.snapshot_records.ready() == []
    assert not list((cloning.root / "state" / "images").glob("*.snap"))
    await group(cloning, *ids)
    for volume_id in ids:
        await down(cloning, volume_id)


async def test_group_with_a_raw_device_in_use_is_refused_without_reflinks(
    copying: Bench,
) -> None:
    one, two = await copying.create("one", block()), await copying.create("two")
    await up(copying, one.volume_id, raw=True)
    with pytest.raises(quiesce.RawDeviceInUse):
        await group(copying, one.volume_id, two.volume_id)
    await down(copying, one.volume_id)
    await group(copying, one.volume_id, two.volume_id)


async def blocks(
    bench: Bench, target: str, base: str = "", *, start: int = 0, count: int = 0
) -> list[list[tuple[int, int]]]:
    servicer = bench.driver.snapshot_metadata
    if base:
        delta = csi_pb2.GetMetadataDeltaRequest(
            base_snapshot_id=base,
            target_snapshot_id=target,
            starting_offset=start,
            max_results=count,
        )
        return [
            [(each.byte_offset, each.size_bytes) for each in message.block_metadata]
            async for message in servicer.GetMetadataDelta(delta, caller())
        ]
    request = csi_pb2.GetMetadataAllocatedRequest(
        snapshot_id=target, starting_offset=start, max_results=count
    )
    return [
        [(each.byte_offset, each.size_bytes) for each in message.block_metadata]
        async for message in servicer.GetMetadataAllocated(request, caller())
    ]


def read_image(bench: Bench, snapshot_id: str) -> bytes:
    return (bench.root / "state" / "images" / f"{snapshot_id}.snap").read_bytes()


def differing_blocks(old: bytes, new: bytes) -> set[int]:
    step = 4 * KIB
    return {n for n in range(0, len(new), step) if old[n : n + step] != new[n : n + step]}


def covered(pieces: list[list[tuple[int, int]]]) -> set[int]:
    step = 4 * KIB
    return {
        n
        for piece in pieces
        for offset, size in piece
        for n in range(offset - offset % step, offset + size, step)
    }


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
        with pytest.raises(changed_blocks.OffsetPastEnd):
            await blocks(cloning, new.snapshot_id, start=start)
    with pytest.raises(snapshot_metadata.NegativeMaxResults):
        await blocks(cloning, new.snapshot_id, count=-1)
    with pytest.raises(take_snapshot.SnapshotNotFound):
        await blocks(cloning, "snap-none")


async def test_changed_blocks_of_snapshots_of_two_volumes_are_refused(cloning: Bench) -> None:
    one, two = await cloning.create("one"), await cloning.create("two")
    first = await snapshot(cloning, one.volume_id, "a")
    second = await snapshot(cloning, two.volume_id, "b")
    with pytest.raises(changed_blocks.UnrelatedSnapshots):
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


async def test_snapshot_interrupted_by_a_crash_leaves_nothing(copying: Bench) -> None:
    source = await copying.create("source")
    taken = await snapshot(copying, source.volume_id)
    snapshot_records = copying.driver.snapshots.volume_snapshots.snapshot_records
    record = snapshot_records.find(taken.snapshot_id)
    assert record is not None
    snapshot_records.save(record.model_copy(update={"phase": "creating"}))
    await asyncio.to_thread(copying.restart)
    assert (
        copying.driver.snapshots.volume_snapshots.snapshot_records.find(taken.snapshot_id) is None
    )
    assert not list((copying.root / "state" / "images").glob("*.snap"))
    assert (await snapshot(copying, source.volume_id)).snapshot_id == taken.snapshot_id
    assert mountinfo.below(str(copying.root / "pods")) == ()
