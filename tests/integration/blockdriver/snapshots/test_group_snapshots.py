"""Groups on every kind of pool: all members of one point in time, raw devices in use too, or refused."""

import itertools
import os
from pathlib import Path

import pytest

from crust.blockdriver.engines import protocol
from crust.blockdriver.engines.files.provisioning import NewFileSnapshotSet
from crust.host.filesystems import superblocks
from crust.host.mounts import mount_api, mountinfo
from tests.integration.blockdriver.snapshots.test_guest_snapshots import Scene, scenes_on
from tests.support.drivers.block_driver import MIB, Bench, block, mount
from tests.support.frozen import is_frozen
from tests.support.raised import raised
from tests.support.records import pool_layout
from tests.support.records.copies import (
    down,
    in_use,
    made_of,
    raw_pair,
    read_image,
    stamp,
    up,
    write,
)

pytestmark = pytest.mark.root


async def test_group_with_used_raw_device_is_consistent_with_reflinks(
    cloning: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied last, while the others are frozen."""
    one, two = await cloning.create("one", block()), await cloning.create("two")
    await up(cloning, one.volume_id, raw=True)
    target = await up(cloning, two.volume_id)
    take, seen = NewFileSnapshotSet.take, []

    def looking(self: NewFileSnapshotSet, image: protocol.Image) -> None:
        seen.append((image.volume_id, is_frozen(target)))
        take(self, image)

    monkeypatch.setattr(NewFileSnapshotSet, "take", looking)
    await cloning.co.group(one.volume_id, two.volume_id)
    assert seen == [(two.volume_id, True), (one.volume_id, True)]


async def test_group_of_raw_devices_is_copied_again_after_a_write(
    cloning: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, targets = await raw_pair(cloning)
    take = NewFileSnapshotSet.take
    taken: list[str] = []

    def interrupted(self: NewFileSnapshotSet, image: protocol.Image) -> None:
        if len(taken) == 1:  # between the two copies: the second would have what the first has not
            stamp(targets[0], b"earlier")
            stamp(targets[1], b"later")
        taken.append(image.volume_id)
        take(self, image)

    monkeypatch.setattr(NewFileSnapshotSet, "take", interrupted)
    made = await cloning.co.group(*ids)
    assert taken == [*ids, *ids]
    by_source = {snapshot.source_volume_id: snapshot.snapshot_id for snapshot in made.snapshots}
    copied = [read_image(cloning, by_source[volume_id])[MIB : MIB + 7] for volume_id in ids]
    assert copied == [b"earlier", b"later\0\0"]


async def test_group_of_raw_devices_looks_at_each_before_last(
    cloning: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to the second of three, between its copy and the last: the third would have what it has not."""
    made = [await cloning.create(name, block()) for name in ("one", "two", "three")]
    ids = sorted(volume.volume_id for volume in made)
    targets = [await up(cloning, volume_id, raw=True) for volume_id in ids]
    take = NewFileSnapshotSet.take
    taken: list[str] = []

    def interrupted(self: NewFileSnapshotSet, image: protocol.Image) -> None:
        if len(taken) == 2:
            stamp(targets[1], b"earlier")
            stamp(targets[2], b"later")
        taken.append(image.volume_id)
        take(self, image)

    monkeypatch.setattr(NewFileSnapshotSet, "take", interrupted)
    group = await cloning.co.group(*ids)
    assert taken == [*ids, *ids]
    by_source = {snapshot.source_volume_id: snapshot.snapshot_id for snapshot in group.snapshots}
    assert read_image(cloning, by_source[ids[1]])[MIB : MIB + 7] == b"earlier"


async def test_group_of_raw_devices_always_written_to_is_refused(
    cloning: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, targets = await raw_pair(cloning)
    take, number = NewFileSnapshotSet.take, itertools.count()

    def interrupted(self: NewFileSnapshotSet, image: protocol.Image) -> None:
        take(self, image)
        stamp(targets[0], b"%d" % next(number))

    with monkeypatch.context() as patched:
        patched.setattr(NewFileSnapshotSet, "take", interrupted)
        with raised("GroupNeverIdle"):
            await cloning.co.group(*ids)
    assert cloning.driver.stores.snapshot_sets.index.page() == ()
    assert not pool_layout.snapshot_images(cloning.root / "state")
    await cloning.co.group(*ids)


async def test_group_with_raw_device_in_use_is_refused_without_reflinks(copying: Bench) -> None:
    one, two = await copying.create("one", block()), await copying.create("two")
    await up(copying, one.volume_id, raw=True)
    with raised("RawDeviceInUse"):
        await copying.co.group(one.volume_id, two.volume_id)
    await down(copying, one.volume_id)
    await copying.co.group(one.volume_id, two.volume_id)


SIZES = [("ext4", 64 * MIB), ("xfs", 320 * MIB), ("btrfs", 256 * MIB)]


scene = scenes_on("xfs")


def uuid_of(bench: Bench, volume_id: str, fs_type: str) -> str:
    """Not by blkid: its sandbox binds the image, and may hold the pool's filesystem for a moment after its end."""
    return superblocks.read(str(bench.image(volume_id)), fs_type).uuid


@pytest.mark.parametrize(("fs_type", "size"), SIZES)
async def test_copies_mount_beside_their_filesystem(scene: Scene, fs_type: str, size: int) -> None:
    bench = scene.bench
    source = await bench.create("source", mount(fs_type), size=size)
    write(await up(bench, source.volume_id, fs_type), "file", b"kept")
    taken = await bench.co.snapshot(source.volume_id)
    restored = await made_of(bench, "restored", snapshot_id=taken.snapshot_id, fs_type=fs_type)
    clone = await made_of(bench, "clone", volume_id=source.volume_id, fs_type=fs_type)
    second = await made_of(bench, "second", volume_id=clone.volume_id, fs_type=fs_type)
    every = [made.volume_id for made in (source, restored, clone, second)]
    for volume_id in every[1:]:
        target = await up(bench, volume_id, fs_type)
        assert Path(target, "file").read_bytes() == b"kept"
        write(target, "own", volume_id.encode())
    for volume_id in every:  # and in another order: a copy first, its source beside it
        await scene.down(volume_id)
    for volume_id in reversed(every):
        await up(bench, volume_id, fs_type)
    for volume_id in every[1:]:
        assert Path(bench.target(volume_id), "own").read_bytes() == volume_id.encode()
    assert not Path(bench.target(source.volume_id), "own").exists()
    for volume_id in every:
        await scene.down(volume_id)
    assert len({uuid_of(bench, volume_id, fs_type) for volume_id in every}) == 1


@pytest.mark.parametrize(("fs_type", "size"), SIZES)
async def test_copy_of_guests_filesystem_mounts_beside_it_with_returned_options(
    scene: Scene, fs_type: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = scene.bench
    source = await bench.create("source", mount(fs_type), size=size)
    write(await scene.up(source.volume_id, fs_type), "file", b"kept")
    clone = await made_of(bench, "clone", volume_id=source.volume_id, fs_type=fs_type)

    def refuse(*_: object, **__: object) -> int:
        raise AssertionError("a guest's filesystem is not mounted on the host")

    target = bench.target(clone.volume_id)
    with monkeypatch.context() as patched:
        patched.setattr("crust.host.mounts.mount_api.open_root", refuse)
        patched.setattr("crust.host.mounts.mount_api.mount_device", refuse)
        await bench.stage(clone.volume_id, mount(fs_type))
        answer = await bench.publish(clone.volume_id, target, mount(fs_type), deferred=True)
    inside = str(bench.root / "beside")
    options = tuple(answer.deferred_mount.mount_options)
    scene.guests.start(target, bench.host_device(clone.volume_id).path, inside, fs_type, options)
    assert Path(inside, "file").read_bytes() == b"kept"
    for volume in (clone, source):
        await scene.down(volume.volume_id)


async def test_btrfs_copy_without_temporary_fsid_is_refused_beside_source(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount_api, "_TEMPORARY_FSIDS", "/sys/no/such/feature")
    bench = scene.bench
    source, source_target = await in_use(bench, "source", mount("btrfs"), size=256 * MIB)
    write(source_target, "file", b"kept")
    again = f"{source_target}-again"
    await bench.publish(source, again, mount("btrfs"))
    clone = await made_of(bench, "clone", volume_id=source, fs_type="btrfs")
    target = bench.target(clone.volume_id)
    await bench.stage(clone.volume_id, mount("btrfs"))
    with raised("DuplicateFilesystemUuid", match=r"/dev/loop\d+ is mounted"):
        await bench.publish(clone.volume_id, target, mount("btrfs"))
    assert mountinfo.at(target) is None
    assert not os.path.exists(target)
    await bench.unpublish(source, again)
    await scene.down(source)
    await bench.publish(clone.volume_id, target, mount("btrfs"))
    assert Path(target, "file").read_bytes() == b"kept"
    await scene.down(clone.volume_id)
