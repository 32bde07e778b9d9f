"""Snapshots and groups of the engine on a real cluster, and the blocks between two of them."""

from typing import Any

import pytest

from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.engines.protocol import NoChangeTracking, Region, SnapshotMissing
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.core import volumes
from tests.support.ceph.rbd_images import (
    OBJECT,
    SIZE,
    A,
    B,
    C,
    ceph_text,
    create,
    drop,
    id_of,
    names,
    note_removal,
    present,
    read,
    restore,
    snapshot_of,
    take,
    trash,
    write,
)

SET = volumes.VolumeId("0123456789abcdef-group-" + "0" * 40)


def test_snapshot_and_restore_keep_the_moment(engine: RbdProvisioning, guest: Any) -> None:
    create(engine, A, SIZE)
    write(guest, A, b"before")
    first = snapshot_of(A, "first")
    take(engine, first)
    write(guest, A, b"later!")
    restore(engine, B, first, 2 * SIZE)
    assert (read(guest, B, 6), read(guest, A, 6)) == (b"before", b"later!")
    assert engine.image_bytes(B) == 2 * SIZE
    assert read(guest, B, 6, SIZE) == bytes(6)
    assert engine.snapshot_ids() == {first.snapshot_id}


def test_snapshot_outlives_its_volume_and_the_name_is_free(
    engine: RbdProvisioning, guest: Any
) -> None:
    create(engine, A, SIZE)
    write(guest, A, b"first")
    first = snapshot_of(A, "first")
    take(engine, first)
    engine.remove(A)
    assert engine.image_ids() == frozenset()
    create(engine, A, SIZE)
    write(guest, A, b"again")
    second = snapshot_of(A, "second")
    take(engine, second)
    engine.remove(A)
    restore(engine, B, first, SIZE)
    restore(engine, C, second, SIZE)
    assert (read(guest, B, 5), read(guest, C, 5)) == (b"first", b"again")
    with pytest.raises(NoChangeTracking):
        engine.changed(first, second)
    for each in (first, second, second):
        drop(engine, each)
    with pytest.raises(SnapshotMissing):
        restore(engine, A, first, SIZE)
    engine.background.look()
    assert len(trash(engine)) == 2, "their clones read from them"
    assert read(guest, B, 5) == b"first"
    engine.remove(B)
    engine.remove(C)
    engine.background.look()
    engine.background.look()
    assert trash(engine) == []


@pytest.mark.parametrize("is_renamed", [False, True])
def test_delete_that_was_cut_off_while_it_put_the_image_aside_is_finished(
    engine: RbdProvisioning, guest: Any, *, is_renamed: bool
) -> None:
    """librbd makes the object of the new name, renames the entry in its directory, removes the object of the old."""
    create(engine, A, SIZE)
    write(guest, A, b"first")
    first = snapshot_of(A, "first")
    take(engine, first)
    image_id = id_of(guest, A)
    if is_renamed:
        engine.remove(A)
        guest.write_full(f"rbd_id.{A}", ceph_text(image_id))
        note_removal(engine, A)
    else:
        note_removal(engine, A)
        guest.write_full(f"rbd_id.deleted.{A}.{image_id}", ceph_text(image_id))
    engine.remove(A)
    assert names(engine) == [f"deleted.{A}.{image_id}"]
    create(engine, A, SIZE)
    restore(engine, B, first, SIZE)
    assert (read(guest, A, 5), read(guest, B, 5)) == (bytes(5), b"first")


def test_snapshot_is_taken_again_under_its_name(engine: RbdProvisioning, guest: Any) -> None:
    create(engine, A, SIZE)
    first = snapshot_of(A, "first")
    with engine.taking(first.snapshot_id, [first]) as taking:
        taking.take(first)
        write(guest, A, b"later")
        taking.take(first)
        taking.commit({RecordKind.SNAPSHOTS: b"a set"})
    restore(engine, B, first, SIZE)
    assert read(guest, B, 5) == b"later"


def test_snapshot_whose_removal_was_cut_off_leaves_nothing(
    engine: RbdProvisioning, guest: Any
) -> None:
    """librbd hides a snapshot first, and was killed before it removed what the snapshot holds."""
    import rbd

    create(engine, A, SIZE)
    first = snapshot_of(A, "first")
    take(engine, first)
    with rbd.Image(guest, A) as image:
        [snapshot] = image.list_snaps()
    header = f"rbd_header.{id_of(guest, A)}"
    guest.execute(header, "rbd", "snapshot_trash_add", snapshot["id"].to_bytes(8, "little"))
    assert engine.snapshot_ids() == frozenset(), "it is hidden"
    drop(engine, first)
    with rbd.Image(guest, A) as image:
        assert list(image.list_snaps()) == []


def test_hidden_snapshot_of_which_a_clone_reads_stays(engine: RbdProvisioning, guest: Any) -> None:
    import rbd

    create(engine, A, SIZE)
    write(guest, A, b"first")
    first = snapshot_of(A, "first")
    take(engine, first)
    restore(engine, B, first, SIZE)
    drop(engine, first)
    drop(engine, first)
    assert read(guest, B, 5) == b"first"
    with rbd.Image(guest, A) as image:
        assert len(list(image.list_snaps())) == 1


def test_changed_and_allocated_blocks_are_whole_objects(
    engine: RbdProvisioning, guest: Any
) -> None:
    create(engine, A, SIZE)
    write(guest, A, b"x", OBJECT + 5)
    first, second = snapshot_of(A, "first"), snapshot_of(A, "second")
    take(engine, first)
    write(guest, A, b"y", 3 * OBJECT)
    take(engine, second)
    write(guest, A, b"z", 0)
    assert engine.allocated(first) == (Region(OBJECT, OBJECT),)
    assert [each.offset for each in engine.allocated(second)] == [OBJECT, 3 * OBJECT]
    assert engine.changed(first, second) == (Region(3 * OBJECT, OBJECT),)
    with pytest.raises(NoChangeTracking):
        engine.changed(second, first)


def test_discarded_blocks_differ(engine: RbdProvisioning, guest: Any) -> None:
    import rbd

    create(engine, A, SIZE)
    write(guest, A, b"x" * OBJECT)
    first, second = snapshot_of(A, "first"), snapshot_of(A, "second")
    take(engine, first)
    with rbd.Image(guest, A) as image:
        image.discard(0, OBJECT)
    take(engine, second)
    assert engine.changed(first, second) == (Region(0, OBJECT),)


def test_write_since_the_snapshot_is_seen_exactly(engine: RbdProvisioning, guest: Any) -> None:
    create(engine, A, SIZE)
    write(guest, A, b"before")
    taken = snapshot_of(A, "taken")
    with engine.taking(taken.snapshot_id, [taken]) as taking:
        taking.take(taken)
        assert not taking.moved_on(taken)
        write(guest, A, b"after")
        assert taking.moved_on(taken)


def test_set_that_is_not_committed_leaves_nothing(engine: RbdProvisioning) -> None:
    for volume_id in (A, B):
        create(engine, volume_id, SIZE)
    group = [snapshot_of(each, each) for each in (A, B)]
    with engine.taking(SET, group) as taking:
        for image in group:
            taking.take(image)
        assert (engine.unsettled(), len(present(engine))) == ((SET,), 2)
    assert (engine.unsettled(), present(engine)) == ((), set())


@pytest.mark.parametrize("is_settled", [False, True])
def test_removal_that_was_cut_off_is_finished_by_a_settlement_or_the_next_call(
    engine: RbdProvisioning, *, is_settled: bool
) -> None:
    create(engine, A, SIZE)
    first = snapshot_of(A, "first")
    take(engine, first)
    noted = f"{A} {first.snapshot_id}".encode()
    engine.set_records.begin_removal(first.snapshot_id, b"a set", noted)
    assert engine.snapshot_ids() == frozenset(), "it is gone"
    if is_settled:
        engine.settle(volumes.VolumeId(first.snapshot_id))
        assert present(engine) == set()
    take(engine, first)
    assert engine.unsettled() == ()
    assert engine.snapshot_ids() == {first.snapshot_id}
