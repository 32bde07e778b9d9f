"""Snapshots, groups and clones of the engine on a real cluster, and the work that makes clones independent."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import rbd

from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.user import CephUser
from crust.blockdriver.engines.pool_access import RecordKind
from crust.blockdriver.engines.protocol import (
    Image,
    ImageMissing,
    NoChangeTracking,
    SnapshotMissing,
)
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.provisioning import copies
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.blockdriver.engines.rbd.provisioning.images import features
from crust.blockdriver.engines.rbd.provisioning.snapshots import RbdSnapshots
from crust.blockdriver.host.extents import Extent
from crust.core import errors, volumes
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.integration.ceph.conftest import QUICK
from tests.support.ceph import rbd_writer as writer
from tests.support.ceph.rbd_images import (
    OBJECT,
    SIZE,
    A,
    B,
    C,
    ceph_text,
    clone,
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
    volume,
    write,
)
from tests.support.faults.crashes import Killed
from tests.support.raised import raised

SET = volumes.VolumeId("0123456789abcdef-group-" + "0" * 40)


def taken(engine: RbdProvisioning, guest: Any, name: str, content: bytes) -> Image:
    """A snapshot of the volume A, which is made and written to."""
    create(engine, A, SIZE)
    write(guest, A, content)
    snapshot = snapshot_of(A, name)
    take(engine, snapshot)
    return snapshot


def depth_of(engine: RbdProvisioning, name: str) -> int:
    with engine.place.ioctx("cannot look") as ioctx:
        return copies.depth(engine.place, ioctx, name)


def test_snapshot_and_restore_keep_the_moment(engine: RbdProvisioning, guest: Any) -> None:
    first = taken(engine, guest, "first", b"before")
    write(guest, A, b"later!")
    restore(engine, B, first, 2 * SIZE)
    assert (read(guest, B, 6), read(guest, A, 6)) == (b"before", b"later!")
    assert engine.image_bytes(B) == 2 * SIZE
    assert read(guest, B, 6, SIZE) == bytes(6)
    assert engine.snapshot_ids() == {first.snapshot_id}


def test_snapshot_outlives_its_volume_and_the_name_is_free(
    engine: RbdProvisioning, guest: Any
) -> None:
    first = taken(engine, guest, "first", b"first")
    engine.remove(A)
    assert engine.image_ids() == frozenset()
    second = taken(engine, guest, "second", b"again")
    engine.remove(A)
    restore(engine, B, first, SIZE)
    restore(engine, C, second, SIZE)
    assert (read(guest, B, 5), read(guest, C, 5)) == (b"first", b"again")
    with pytest.raises(NoChangeTracking):
        engine.changed(first, second)
    for snapshot in (first, second, second):
        drop(engine, snapshot)
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
def test_delete_cut_off_while_it_put_image_aside_is_finished(
    engine: RbdProvisioning, guest: Any, *, is_renamed: bool
) -> None:
    """librbd makes the object of the new name, renames the entry in its directory, removes the object of the old."""
    first = taken(engine, guest, "first", b"first")
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
    first = taken(engine, guest, "first", b"first")
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
    with rbd.Image(guest, A) as image:
        image.discard(OBJECT, OBJECT)
    third = snapshot_of(A, "third")
    take(engine, third)
    write(guest, A, b"z", 0)
    assert engine.changed(second, third) == (Extent(OBJECT, OBJECT),)
    assert engine.allocated(first) == (Extent(OBJECT, OBJECT),)
    assert [region.offset for region in engine.allocated(second)] == [OBJECT, 3 * OBJECT]
    assert engine.changed(first, second) == (Extent(3 * OBJECT, OBJECT),)
    with pytest.raises(NoChangeTracking):
        engine.changed(second, first)


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
    group = [snapshot_of(volume_id, volume_id) for volume_id in (A, B)]
    with engine.taking(SET, group) as taking:
        for image in group:
            taking.take(image)
        assert (engine.unsettled(), len(present(engine))) == ((SET,), 2)
    assert (engine.unsettled(), present(engine)) == ((), set())


@pytest.mark.parametrize("is_settled", [False, True])
def test_removal_cut_off_is_finished_by_settlement_or_next_call(
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


def test_clone_of_a_volume_leaves_no_snapshot(engine: RbdProvisioning, guest: Any) -> None:
    create(engine, A, SIZE)
    write(guest, A, b"source")
    clone(engine, B, A, source_bytes=SIZE, size_bytes=2 * SIZE)
    write(guest, A, b"later!")
    assert read(guest, B, 6) == b"source"
    assert engine.snapshot_ids() == frozenset()
    engine.remove(A)
    engine.background.look()
    assert read(guest, B, 6) == b"source"


def test_image_of_deleted_volume_is_not_kept_for_killed_clone(
    engine: RbdProvisioning, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(engine, A, SIZE)

    with _killed_before(monkeypatch, RbdSnapshots, "remove_snapshot"):
        clone(engine, B, A, source_bytes=SIZE, size_bytes=SIZE)
    engine.remove(A)
    assert engine.snapshot_ids() == {f"clone-{B}"}, "kept aside with it"
    engine.remove(B)
    assert engine.snapshot_ids() == frozenset()
    for _ in range(2):  # the clone first
        engine.background.look()
    assert (names(engine), trash(engine)) == ([], [])


def test_clone_of_a_truncated_or_absent_volume_is_refused(engine: RbdProvisioning) -> None:
    create(engine, A, SIZE)
    with raised("SourceTruncated"):
        clone(engine, B, A, source_bytes=2 * SIZE, size_bytes=2 * SIZE)
    with pytest.raises(ImageMissing):
        clone(engine, B, C, source_bytes=SIZE, size_bytes=SIZE)


def test_deep_clones_are_flattened_in_background_before_deeper_ones(
    engine: RbdProvisioning, guest: Any
) -> None:
    chain = [volume(f"chain {number}") for number in range(copies.HARD_DEPTH + 2)]
    create(engine, chain[0], SIZE)
    write(guest, chain[0], b"deep")
    made = chain[:-1]
    for source, target in itertools.pairwise(made):
        clone(engine, target, source, source_bytes=SIZE, size_bytes=SIZE)
    with raised("CloneDepthReached"):
        clone(engine, chain[-1], made[-1], source_bytes=SIZE, size_bytes=SIZE)
    engine.background.look()
    assert max(depth_of(engine, name) for name in made) <= copies.SOFT_DEPTH
    assert read(guest, made[-1], 4) == b"deep"
    clone(engine, chain[-1], made[-1], source_bytes=SIZE, size_bytes=SIZE)


def test_flattening_cut_off_in_middle_is_done_again_by_next(
    engine: RbdProvisioning,
    guest: Any,
    ceph: CephCluster,
    controller: CephUser,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 128 * OBJECT
    create(engine, A, size)
    write(guest, A, b"x" * size)
    clone(engine, B, A, source_bytes=size, size_bytes=size)
    with engine.place.ioctx("cannot put") as ioctx:
        copies.put_flatten(ioctx, B)
    monkeypatch.setattr(copies, "SOFT_DEPTH", 0)
    other = Connection(controller, QUICK)
    try:
        dying = RbdProvisioning(Namespace.of(other, POOL, namespace))
        with ThreadPoolExecutor(1) as threads:
            flattening = threads.submit(dying.background.look)
            _wait_until_copied(guest, B)
            ceph.command("osd blocklist", blocklistop="add", addr=other.address())
            with pytest.raises(errors.CrustError):
                flattening.result(60)
    finally:
        other.close()
    engine.background.look()
    assert depth_of(engine, B) == 0
    content = read(guest, B, size)
    lost = [at for at in range(0, size, OBJECT) if content[at : at + OBJECT] != b"x" * OBJECT]
    assert lost == []


def _wait_until_copied(ioctx: Any, name: str) -> None:
    """Until the clone has an object of its own."""
    with rbd.Image(ioctx, name, read_only=True) as image:
        prefix = image.block_name_prefix()
    while not any(known.key.startswith(prefix) for known in ioctx.list_objects()):
        pass


def test_clone_flattened_below_a_guest_keeps_its_object_map(
    engine: RbdProvisioning,
    guest: Any,
    ceph: CephCluster,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create(engine, A, SIZE)
    write(guest, A, b"x" * SIZE)
    clone(engine, B, A, source_bytes=SIZE, size_bytes=SIZE)
    with engine.place.ioctx("cannot put") as ioctx:
        copies.put_flatten(ioctx, B)
    monkeypatch.setattr(copies, "SOFT_DEPTH", 0)
    with writer.running(ceph, namespace, B) as client:
        engine.background.look()
        client.write(b"it goes on")
    assert read(guest, B, SIZE) == b"it goes on" + b"x" * (SIZE - 10)
    with engine.place.ioctx("cannot look") as ioctx, engine.place.image(ioctx, B) as image:
        assert image.features() & features() == features()
        assert image.flags() == 0
    assert depth_of(engine, B) == 0


def test_unfinished_copy_is_flattened_only_once_complete(
    engine: RbdProvisioning, guest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry knows it by its parent: one with data and without a parent is somebody else's."""
    create(engine, A, SIZE)
    write(guest, A, b"deep")
    monkeypatch.setattr(copies, "SOFT_DEPTH", 0)
    with _killed_before(monkeypatch, copies, "enlarge"):
        clone(engine, B, A, source_bytes=SIZE, size_bytes=SIZE)
    engine.background.look()
    clone(engine, B, A, source_bytes=SIZE, size_bytes=SIZE)
    assert read(guest, B, 4) == b"deep"
    engine.background.look()
    assert depth_of(engine, B) == 0


@contextmanager
def _killed_before(patch: pytest.MonkeyPatch, owner: object, step: str) -> Iterator[None]:
    """What the block does ends before `step` of `owner`."""

    def die(*_: object) -> None:
        raise Killed

    with patch.context() as until_then:
        until_then.setattr(owner, step, die)
        with pytest.raises(Killed):
            yield
