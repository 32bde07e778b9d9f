"""Groups on every kind of pool: all members of one point in time, raw devices in use too, or refused."""

import hashlib
import itertools
import os

import pytest

from crust.blockdriver.engines import protocol
from crust.blockdriver.engines.files.provisioning import FileTaking
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, block, caller
from tests.support.frozen import is_frozen
from tests.support.raised import raised
from tests.support.records import pool_layout
from tests.support.records.copies import (
    digest,
    down,
    drop,
    group,
    made_of,
    raw_pair,
    read_image,
    stamp,
    up,
    write,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


async def test_group_snapshot_freezes_all_members_before_the_first_copy(
    pool: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [await pool.create(name) for name in ("one", "two")]
    targets = [await up(pool, each.volume_id) for each in made]
    data = [os.urandom(MIB) for _ in made]
    for target, content in zip(targets, data, strict=True):
        write(target, "file", content)
    take, seen = FileTaking.take, []

    def looking(self: FileTaking, image: protocol.Image) -> None:
        seen.append([is_frozen(target) for target in targets])
        take(self, image)

    monkeypatch.setattr(FileTaking, "take", looking)
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


async def test_group_is_deleted_as_one_and_has_each_volume_once(cloning: Bench) -> None:
    ids = [(await cloning.create(name)).volume_id for name in ("one", "two")]
    with raised("SameVolumeTwice"):
        await group(cloning, ids[0], ids[0], name="h")
    taken = await group(cloning, *ids)
    members = [each.snapshot_id for each in taken.snapshots]
    with raised("SnapshotBelongsToGroup"):
        await drop(cloning, members[0])
    request = csi_pb2.DeleteVolumeGroupSnapshotRequest(
        group_snapshot_id=taken.group_snapshot_id, snapshot_ids=members
    )
    await cloning.driver.snapshot_calls.DeleteVolumeGroupSnapshot(request, caller())
    assert cloning.driver.snapshots.records.ids() == ()
    assert not pool_layout.snapshot_images(cloning.root / "state")


async def test_group_with_a_raw_device_in_use_is_point_in_time_with_reflinks(
    cloning: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied last, while the others are frozen."""
    one, two = await cloning.create("one", block()), await cloning.create("two")
    await up(cloning, one.volume_id, raw=True)
    target = await up(cloning, two.volume_id)
    take, seen = FileTaking.take, []

    def looking(self: FileTaking, image: protocol.Image) -> None:
        seen.append((image.volume_id, is_frozen(target)))
        take(self, image)

    monkeypatch.setattr(FileTaking, "take", looking)
    await group(cloning, one.volume_id, two.volume_id)
    assert seen == [(two.volume_id, True), (one.volume_id, True)]


async def test_group_of_raw_devices_is_copied_again_after_a_write(
    cloning: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, targets = await raw_pair(cloning)
    take = FileTaking.take
    taken: list[str] = []

    def interrupted(self: FileTaking, image: protocol.Image) -> None:
        if len(taken) == 1:  # between the two copies: the second would have what the first has not
            stamp(targets[0], b"earlier")
            stamp(targets[1], b"later")
        taken.append(image.volume_id)
        take(self, image)

    monkeypatch.setattr(FileTaking, "take", interrupted)
    made = await group(cloning, *ids)
    assert taken == [*ids, *ids]
    by_source = {each.source_volume_id: each.snapshot_id for each in made.snapshots}
    found = [read_image(cloning, by_source[each])[MIB : MIB + 7] for each in ids]
    assert found == [b"earlier", b"later\0\0"]


async def test_group_of_raw_devices_always_written_to_is_refused(
    cloning: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, targets = await raw_pair(cloning)
    take, number = FileTaking.take, itertools.count()

    def interrupted(self: FileTaking, image: protocol.Image) -> None:
        take(self, image)
        stamp(targets[0], b"%d" % next(number))

    with monkeypatch.context() as patched:
        patched.setattr(FileTaking, "take", interrupted)
        with raised("GroupNeverIdle"):
            await group(cloning, *ids)
    assert cloning.driver.snapshots.records.ids() == ()
    assert not pool_layout.snapshot_images(cloning.root / "state")
    await group(cloning, *ids)


async def test_group_with_a_raw_device_in_use_is_refused_without_reflinks(copying: Bench) -> None:
    one, two = await copying.create("one", block()), await copying.create("two")
    await up(copying, one.volume_id, raw=True)
    with raised("RawDeviceInUse"):
        await group(copying, one.volume_id, two.volume_id)
    await down(copying, one.volume_id)
    await group(copying, one.volume_id, two.volume_id)
