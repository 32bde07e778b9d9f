"""Images, snapshots and clones of the engine on a real cluster."""

import contextlib
import hashlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from crust import errors, volumes
from crust.blockdriver.engines.protocol import (
    ForeignImage,
    Image,
    ImageMissing,
    NoChangeTracking,
    Region,
    SnapshotMissing,
    StillAttached,
)
from crust.blockdriver.engines.rbd import (
    background,
    copies,
    image_change,
    image_use,
    images,
    omap,
)
from crust.blockdriver.engines.rbd.background import BackgroundWork
from crust.blockdriver.engines.rbd.copies import CloneDepthReached, SourceTruncated
from crust.blockdriver.engines.rbd.engine import RbdProvisioning, provisioning
from crust.blockdriver.engines.rbd.image_use import RbdClientSilent
from crust.blockdriver.engines.rbd.images import features
from crust.blockdriver.engines.rbd.limits import RbdLimits
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.blockdriver.engines.rbd.snapshots import GroupNeverIdle
from crust.ceph import claims, own_clients
from crust.ceph.claim_object import Mode
from crust.ceph.connection import CephUser, Connection
from crust.ceph.failures import CephImageBusy
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.integration.ceph.conftest import QUICK
from tests.support import rbd_writer as writer

MIB = 1024**2
OBJECT = 4 * MIB
SIZE = 16 * MIB


@pytest.fixture
def engine(connection: Connection, namespace: str) -> RbdProvisioning:
    """The engine with a new pool; its background work is done when a test says so."""
    place = Place(connection, POOL, namespace)
    RbdPool(place, create=True).open()
    return provisioning(place)


@pytest.fixture
def guest(ceph: CephCluster, namespace: str) -> Iterator[Any]:
    """The namespace as a client has it that writes to images: a connection of its own."""
    user = f"node-{uuid.uuid4().hex[:8]}"
    connected = ceph.connected(user, ceph.node(user, namespace))
    ioctx = connected.open_ioctx(POOL)
    ioctx.set_namespace(namespace)
    yield ioctx
    ioctx.close()
    connected.shutdown()


def _volume(name: str) -> volumes.VolumeId:
    return volumes.VolumeId(f"0123456789abcdef-{hashlib.sha256(name.encode()).hexdigest()[:40]}")


def _snapshot(volume_id: volumes.VolumeId, name: str, size: int = SIZE) -> Image:
    digest = hashlib.sha256(name.encode()).hexdigest()[:40]
    return Image(f"0123456789abcdef-snap-{digest}", volume_id, size)


A, B, C, D = _volume("a"), _volume("b"), _volume("c"), _volume("d")


def _write(ioctx: Any, name: str, data: bytes, offset: int = 0) -> None:
    import rbd

    with rbd.Image(ioctx, name) as image:
        image.write(data, offset)
        image.flush()


def _read(ioctx: Any, name: str, length: int, offset: int = 0) -> bytes:
    import rbd

    with rbd.Image(ioctx, name, read_only=True) as image:
        found: bytes = image.read(offset, length)
        return found


def test_create_is_idempotent_and_keeps_what_is_there(engine: RbdProvisioning) -> None:
    engine.create(A, SIZE)
    engine.create(A, SIZE)
    assert (engine.exists(A), engine.image_bytes(A), engine.image_ids()) == (
        True,
        SIZE,
        frozenset({A}),
    )
    assert engine.image_problem(A, SIZE) == ""
    assert "should have" in engine.image_problem(A, SIZE + 1)
    assert engine.image_problem(B, SIZE) != ""


def test_foreign_image_with_data_is_refused_and_kept(engine: RbdProvisioning, guest: Any) -> None:
    import rbd

    rbd.RBD().create(guest, A, SIZE)
    _write(guest, A, b"somebody's")
    with pytest.raises(ForeignImage):
        engine.create(A, SIZE)
    with pytest.raises(ForeignImage):
        engine.copies.clone(A, _source(engine), source_bytes=SIZE, size_bytes=SIZE)
    assert _read(guest, A, 10) == b"somebody's"


def _source(engine: RbdProvisioning) -> volumes.VolumeId:
    engine.create(B, SIZE)
    return B


def test_image_without_a_header_is_made_anew(engine: RbdProvisioning, guest: Any) -> None:
    """A create that was killed inside librbd leaves the name alone."""
    import rbd

    rbd.RBD().create(guest, A, SIZE)
    with rbd.Image(guest, A) as image:
        header = f"rbd_header.{image.id()}"
    guest.remove_object(header)
    engine.create(A, SIZE)
    assert engine.image_bytes(A) == SIZE


@pytest.mark.parametrize("is_deleted_again", [True, False])
def test_name_whose_image_was_being_removed_is_made_anew(
    engine: RbdProvisioning, guest: Any, *, is_deleted_again: bool
) -> None:
    """librbd removes the object of the name before its entry in the directory, and was killed in between."""
    import rbd

    rbd.RBD().create(guest, A, SIZE)
    guest.remove_object(f"rbd_id.{A}")
    assert A in rbd.RBD().list(guest)
    if is_deleted_again:
        engine.delete(A)
        assert A not in rbd.RBD().list(guest)
    engine.create(A, SIZE)
    assert engine.image_bytes(A) == SIZE
    assert A in rbd.RBD().list(guest)
    engine.delete(A)
    assert A not in rbd.RBD().list(guest)


@pytest.mark.parametrize("has_entry", [False, True])
def test_image_whose_way_to_the_trash_was_cut_off_is_removed_from_it(
    engine: RbdProvisioning, guest: Any, *, has_entry: bool
) -> None:
    """librbd notes an image in the trash as moving, takes its name away, and was killed before it noted the end."""
    engine.create(A, SIZE)
    _write(guest, A, b"data")
    engine.delete(A)
    [image_id] = [each["id"] for each in engine.place.images.trash_list(guest)]
    guest.execute("rbd_trash", "rbd", "trash_state_set", _text(image_id) + b"\1\0")
    if has_entry:
        guest.execute("rbd_directory", "rbd", "dir_add_image", _text(A) + _text(image_id))
    engine.background.look()
    assert (_trash(engine), _names(engine)) == ([], [])
    assert not [each.key for each in guest.list_objects() if image_id in each.key]


def test_image_that_is_on_its_way_to_the_trash_is_left_to_whoever_moves_it(
    engine: RbdProvisioning, guest: Any
) -> None:
    engine.create(A, SIZE)
    image_id = _image_id(guest, A)
    engine.delete(A)
    guest.execute("rbd_trash", "rbd", "trash_state_set", _text(image_id) + b"\1\0")
    guest.write_full(f"rbd_id.{A}", _text(image_id))  # its name is not taken away yet
    guest.execute("rbd_directory", "rbd", "dir_add_image", _text(A) + _text(image_id))
    engine.background.look()
    assert engine.image_bytes(A) == SIZE
    engine.delete(A)
    engine.background.look()
    assert (_trash(engine), _names(engine)) == ([], [])


def _image_id(ioctx: Any, name: str) -> str:
    import rbd

    with rbd.Image(ioctx, name, read_only=True) as image:
        return str(image.id())


def _text(text: str) -> bytes:
    """As Ceph writes it."""
    return len(text).to_bytes(4, "little") + text.encode()


def test_clone_takes_the_name_of_an_image_that_was_being_removed(
    engine: RbdProvisioning, guest: Any
) -> None:
    import rbd

    source = _source(engine)
    rbd.RBD().create(guest, A, SIZE)
    guest.remove_object(f"rbd_id.{A}")
    engine.copies.clone(A, source, source_bytes=SIZE, size_bytes=SIZE)
    assert engine.image_bytes(A) == SIZE
    assert A in rbd.RBD().list(guest)


def test_grow_never_shrinks(engine: RbdProvisioning) -> None:
    engine.create(A, SIZE)
    engine.grow(A, 2 * SIZE)
    engine.grow(A, SIZE)
    assert engine.image_bytes(A) == 2 * SIZE
    with pytest.raises(ImageMissing):
        engine.grow(B, SIZE)


def test_delete_goes_by_the_trash_which_is_emptied(engine: RbdProvisioning, guest: Any) -> None:
    engine.create(A, SIZE)
    _write(guest, A, b"x" * OBJECT)
    engine.delete(A)
    engine.delete(A)
    assert not engine.exists(A)
    assert _trash(engine)
    engine.background.look()
    assert not _trash(engine)


def test_image_that_the_controller_flattens_is_attached_and_deleted(
    engine: RbdProvisioning, guest: Any
) -> None:
    engine.create(A, SIZE)
    with (
        engine.place.ioctx("flatten") as ioctx,
        engine.place.image(ioctx, A, read_only=False) as image,
    ):
        image.write(b"x", 0)  # it has RBD's lock
        holder = claims.take(guest, A, Mode.WRITER, claims.Host("node", "machine"), "pod", "vm")
        claims.give_back(guest, A, holder.id)
        engine.delete(A)
    assert not engine.exists(A)


def _trash(engine: RbdProvisioning) -> list[str]:
    with engine.place.ioctx("cannot list") as ioctx:
        return [each["name"] for each in engine.place.images.trash_list(ioctx)]


def _names(engine: RbdProvisioning) -> list[str]:
    with engine.place.ioctx("cannot list") as ioctx:
        return engine.place.names(ioctx)


def test_image_that_a_client_has_open_is_not_deleted(engine: RbdProvisioning, guest: Any) -> None:
    import rbd

    engine.create(A, SIZE)
    with rbd.Image(guest, A), pytest.raises(StillAttached, match="127"):
        engine.delete(A)
    engine.delete(A)


def test_image_that_a_sandbox_has_claimed_is_not_deleted(
    engine: RbdProvisioning, guest: Any
) -> None:
    engine.create(A, SIZE)
    holder = claims.take(
        guest, A, Mode.WRITER, claims.Host("node-1", "machine"), "sandbox-1", "vm-1"
    )
    with pytest.raises(StillAttached, match="sandbox-1"):
        engine.delete(A)
    claims.give_back(guest, A, holder.id)
    engine.delete(A)
    assert not engine.exists(A)


def test_snapshot_and_restore_keep_the_moment(engine: RbdProvisioning, guest: Any) -> None:
    engine.create(A, SIZE)
    _write(guest, A, b"before")
    first = _snapshot(A, "first")
    engine.take_snapshot(first)
    _write(guest, A, b"later!")
    engine.restore(B, first, 2 * SIZE)
    engine.restore(B, first, 2 * SIZE)  # a retry replaces it
    assert (_read(guest, B, 6), _read(guest, A, 6)) == (b"before", b"later!")
    assert engine.image_bytes(B) == 2 * SIZE
    assert _read(guest, B, 6, SIZE) == bytes(6)
    assert engine.snapshot_ids() == {first.snapshot_id}


def test_snapshot_outlives_its_volume_and_the_name_is_free(
    engine: RbdProvisioning, guest: Any
) -> None:
    engine.create(A, SIZE)
    _write(guest, A, b"first")
    first = _snapshot(A, "first")
    engine.take_snapshot(first)
    engine.delete(A)
    assert (engine.exists(A), engine.image_ids()) == (False, frozenset())
    engine.create(A, SIZE)
    _write(guest, A, b"again")
    second = _snapshot(A, "second")
    engine.take_snapshot(second)
    engine.delete(A)
    engine.restore(B, first, SIZE)
    engine.restore(C, second, SIZE)
    assert (_read(guest, B, 5), _read(guest, C, 5)) == (b"first", b"again")
    with pytest.raises(NoChangeTracking):
        engine.changed(first, second)
    for each in (first, second, second):
        engine.delete_snapshot(each)
    with pytest.raises(SnapshotMissing):
        engine.restore(A, first, SIZE)
    engine.background.look()
    assert len(_trash(engine)) == 2, "their clones read from them"
    assert _read(guest, B, 5) == b"first"
    engine.delete(B)
    engine.delete(C)
    engine.background.look()
    engine.background.look()
    assert _trash(engine) == []


@pytest.mark.parametrize("is_renamed", [False, True])
def test_delete_that_was_cut_off_while_it_put_the_image_aside_is_finished(
    engine: RbdProvisioning, guest: Any, *, is_renamed: bool
) -> None:
    """librbd makes the object of the new name, renames the entry in its directory, removes the object of the old."""
    engine.create(A, SIZE)
    _write(guest, A, b"first")
    first = _snapshot(A, "first")
    engine.take_snapshot(first)
    image_id = _image_id(guest, A)
    if is_renamed:
        engine.delete(A)
        guest.write_full(f"rbd_id.{A}", _text(image_id))
    else:
        guest.write_full(f"rbd_id.deleted.{A}.{image_id}", _text(image_id))
    engine.delete(A)
    assert (engine.exists(A), _names(engine)) == (False, [f"deleted.{A}.{image_id}"])
    engine.create(A, SIZE)
    engine.restore(B, first, SIZE)
    assert (_read(guest, A, 5), _read(guest, B, 5)) == (bytes(5), b"first")


def test_snapshot_is_taken_again_under_its_name(engine: RbdProvisioning, guest: Any) -> None:
    engine.create(A, SIZE)
    first = _snapshot(A, "first")
    engine.take_snapshot(first)
    _write(guest, A, b"later")
    engine.take_snapshot(first)
    engine.restore(B, first, SIZE)
    assert _read(guest, B, 5) == b"later"


def test_snapshot_whose_removal_was_cut_off_leaves_nothing(
    engine: RbdProvisioning, guest: Any
) -> None:
    """librbd hides a snapshot first, and was killed before it removed what the snapshot holds."""
    import rbd

    engine.create(A, SIZE)
    first = _snapshot(A, "first")
    engine.take_snapshot(first)
    with rbd.Image(guest, A) as image:
        [snapshot] = image.list_snaps()
    header = f"rbd_header.{_image_id(guest, A)}"
    guest.execute(header, "rbd", "snapshot_trash_add", snapshot["id"].to_bytes(8, "little"))
    assert engine.snapshot_ids() == frozenset(), "it is hidden"
    engine.delete_snapshot(first)
    with rbd.Image(guest, A) as image:
        assert list(image.list_snaps()) == []


def test_hidden_snapshot_of_which_a_clone_reads_stays(engine: RbdProvisioning, guest: Any) -> None:
    import rbd

    engine.create(A, SIZE)
    _write(guest, A, b"first")
    first = _snapshot(A, "first")
    engine.take_snapshot(first)
    engine.restore(B, first, SIZE)
    engine.delete_snapshot(first)
    engine.delete_snapshot(first)
    assert _read(guest, B, 5) == b"first"
    with rbd.Image(guest, A) as image:
        assert len(list(image.list_snaps())) == 1


def test_clone_of_a_volume_leaves_no_snapshot(engine: RbdProvisioning, guest: Any) -> None:
    engine.create(A, SIZE)
    _write(guest, A, b"source")
    engine.clone(B, A, source_bytes=SIZE, size_bytes=2 * SIZE)
    _write(guest, A, b"later!")
    assert _read(guest, B, 6) == b"source"
    assert engine.snapshot_ids() == frozenset()
    engine.delete(A)
    engine.background.look()
    assert _read(guest, B, 6) == b"source"


def test_clone_that_was_killed_before_it_cleaned_up_is_cleared_by_the_retry_or_the_delete(
    engine: RbdProvisioning, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create(A, SIZE)

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(copies.RbdCopies, "_forget", killed)
        with pytest.raises(Killed):
            engine.clone(B, A, source_bytes=SIZE, size_bytes=SIZE)
    assert engine.snapshot_ids() == {f"clone-{B}"}
    engine.clone(B, A, source_bytes=SIZE, size_bytes=SIZE)
    assert engine.snapshot_ids() == frozenset()
    with monkeypatch.context() as patch:
        patch.setattr(copies.RbdCopies, "_forget", killed)
        with pytest.raises(Killed):
            engine.clone(C, A, source_bytes=SIZE, size_bytes=SIZE)
    engine.delete(C)
    assert engine.snapshot_ids() == frozenset()


def test_image_of_a_deleted_volume_is_not_kept_for_a_killed_clone(
    engine: RbdProvisioning, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create(A, SIZE)

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(copies.RbdCopies, "_forget", killed)
        with pytest.raises(Killed):
            engine.clone(B, A, source_bytes=SIZE, size_bytes=SIZE)
    engine.delete(A)
    assert engine.snapshot_ids() == {f"clone-{B}"}, "kept aside with it"
    engine.delete(B)
    assert engine.snapshot_ids() == frozenset()
    for _ in range(2):  # the clone first
        engine.background.look()
    assert (_names(engine), _trash(engine)) == ([], [])


def test_clone_of_a_truncated_or_absent_volume_is_refused(engine: RbdProvisioning) -> None:
    engine.create(A, SIZE)
    with pytest.raises(SourceTruncated):
        engine.clone(B, A, source_bytes=2 * SIZE, size_bytes=2 * SIZE)
    with pytest.raises(ImageMissing):
        engine.clone(B, C, source_bytes=SIZE, size_bytes=SIZE)


def test_deep_clones_are_flattened_in_the_background_and_too_deep_ones_wait(
    engine: RbdProvisioning, guest: Any
) -> None:
    chain = [_volume(f"chain {each}") for each in range(copies.HARD_DEPTH + 2)]
    engine.create(chain[0], SIZE)
    _write(guest, chain[0], b"deep")
    made = chain[:-1]
    for source, target in itertools.pairwise(made):
        engine.clone(target, source, source_bytes=SIZE, size_bytes=SIZE)
    with pytest.raises(CloneDepthReached):
        engine.clone(chain[-1], made[-1], source_bytes=SIZE, size_bytes=SIZE)
    engine.background.look()
    with engine.place.ioctx("cannot look") as ioctx:
        depths = [engine.copies.depth(ioctx, each) for each in made]
    assert max(depths) <= copies.SOFT_DEPTH
    assert _read(guest, made[-1], 4) == b"deep"
    engine.clone(chain[-1], made[-1], source_bytes=SIZE, size_bytes=SIZE)


def test_changed_and_allocated_blocks_are_whole_objects(
    engine: RbdProvisioning, guest: Any
) -> None:
    engine.create(A, SIZE)
    _write(guest, A, b"x", OBJECT + 5)
    first, second = _snapshot(A, "first"), _snapshot(A, "second")
    engine.take_snapshot(first)
    _write(guest, A, b"y", 3 * OBJECT)
    engine.take_snapshot(second)
    _write(guest, A, b"z", 0)
    assert engine.allocated(first) == (Region(OBJECT, OBJECT),)
    assert [each.offset for each in engine.allocated(second)] == [OBJECT, 3 * OBJECT]
    assert engine.changed(first, second) == (Region(3 * OBJECT, OBJECT),)
    with pytest.raises(NoChangeTracking):
        engine.changed(second, first)


def test_discarded_blocks_differ(engine: RbdProvisioning, guest: Any) -> None:
    import rbd

    engine.create(A, SIZE)
    _write(guest, A, b"x" * OBJECT)
    first, second = _snapshot(A, "first"), _snapshot(A, "second")
    engine.take_snapshot(first)
    with rbd.Image(guest, A) as image:
        image.discard(0, OBJECT)
    engine.take_snapshot(second)
    assert engine.changed(first, second) == (Region(0, OBJECT),)


def test_group_is_of_one_moment(engine: RbdProvisioning, guest: Any) -> None:
    for each in (A, B):
        engine.create(each, SIZE)
        _write(guest, each, b"both")
    images = [_snapshot(A, "member a"), _snapshot(B, "member b")]
    assert engine.take_group(images)
    engine.restore(C, images[0], SIZE)
    assert _read(guest, C, 4) == b"both"


def test_group_that_is_written_to_during_every_try_is_refused(
    engine: RbdProvisioning, guest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (A, B):
        engine.create(each, SIZE)
    from crust.blockdriver.engines.rbd.snapshots import RbdSnapshots

    original = RbdSnapshots.take

    def with_a_write(self: RbdSnapshots, snapshot: Image) -> None:
        original(self, snapshot)
        _write(guest, snapshot.volume_id, b"never idle")

    monkeypatch.setattr(RbdSnapshots, "take", with_a_write)
    with pytest.raises(GroupNeverIdle, match=A):
        engine.take_group([_snapshot(A, "member a"), _snapshot(B, "member b")])


def test_64_parallel_creates_make_64_images(engine: RbdProvisioning) -> None:
    wanted = [_volume(f"parallel {each}") for each in range(64)]
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(lambda each: engine.create(each, SIZE), wanted))
    assert engine.image_ids() == frozenset(wanted)


def test_creates_of_one_image_at_once_make_one(engine: RbdProvisioning) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = [threads.submit(engine.create, A, SIZE) for _ in range(8)]
        found = [each.exception() for each in made]
    assert None in found
    engine.create(A, SIZE)
    assert engine.image_bytes(A) == SIZE


def test_silent_client_is_not_cut_off_by_a_change(
    engine: RbdProvisioning, ceph: CephCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librbd would treat it as dead after 30 s, break its lock and blocklist it."""
    engine.create(A, SIZE)
    snapshot = _snapshot(A, "while it is paused")
    with writer.running(ceph, namespace, A) as client:
        with client.frozen():
            changes: tuple[Callable[[], None], ...] = (
                lambda: engine.take_snapshot(snapshot),
                lambda: engine.grow(A, 2 * SIZE),
                lambda: engine.clone(B, A, source_bytes=SIZE, size_bytes=SIZE),
                lambda: RbdLimits(engine.place).set_limits(A, volumes.IoLimits(write_iops=100)),
                lambda: engine.background._flatten(A, b""),
            )
            monkeypatch.setattr(copies.RbdCopies, "depth", lambda *_: copies.SOFT_DEPTH + 1)
            for change in changes:
                with pytest.raises(RbdClientSilent, match="127"):
                    change()
        engine.take_snapshot(snapshot)
        client.write(b"it goes on")
    assert engine.snapshot_ids() == frozenset({snapshot.snapshot_id})


def _until_not_busy(change: Callable[[], None]) -> None:
    """Repeat what is UNAVAILABLE, as a CO does: the client hears a little later of what was undone meanwhile."""
    for _ in range(100):
        with contextlib.suppress(CephImageBusy):
            return change()
    return change()


def _answered_before(patch: pytest.MonkeyPatch, questions: int = 1) -> None:
    """The frozen clients have answered so many questions, and fall silent after them."""
    first, real = iter([True] * questions), image_use.answer
    patch.setattr(image_use, "answer", lambda *asked: next(first, False) or real(*asked))


def _lock_owners(engine: RbdProvisioning, name: str) -> tuple[str, ...]:
    with engine.place.ioctx("cannot look") as ioctx, engine.place.image(ioctx, name) as image:
        return image_use.lock_owners(image)


def _wait_until_forgotten(engine: RbdProvisioning, name: str) -> None:
    """Until the OSD takes the frozen clients for dead, and librbd may break their locks."""
    with engine.place.ioctx("cannot look") as ioctx, engine.place.image(ioctx, name) as image:
        while image_use.watchers(image):
            pass


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_client_that_falls_silent_after_it_was_asked_keeps_its_lock_and_goes_on(
    engine: RbdProvisioning,
    ceph: CephCluster,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_forgotten: bool,
) -> None:
    """librbd would break its lock after 30 s; a client without its lock is blocklisted, or hangs when it wakes up."""
    engine.create(A, SIZE)
    snapshot = _snapshot(A, "while it is paused")
    with writer.running(ceph, namespace, A) as client:
        owners = _lock_owners(engine, A)
        with client.frozen(), monkeypatch.context() as patch:
            _answered_before(patch)
            with pytest.raises(RbdClientSilent):
                engine.take_snapshot(snapshot)
            if is_forgotten:
                _wait_until_forgotten(engine, A)
            assert _lock_owners(engine, A) == owners
        client.write(b"it goes on")
        _until_not_busy(lambda: engine.take_snapshot(snapshot))
        engine.restore(B, snapshot, SIZE)
        client.write(b"later")
        assert _lock_owners(engine, A) == owners
    with engine.place.ioctx("cannot read") as ioctx, engine.place.image(ioctx, B) as image:
        assert image.read(0, 10) == b"it goes on"


@pytest.mark.parametrize(
    ("change", "questions"),
    [
        (lambda engine: engine.grow(B, 2 * SIZE), 1),
        (lambda engine: engine.clone(C, B, source_bytes=SIZE, size_bytes=SIZE), 2),
        (lambda engine: engine.delete_snapshot(_snapshot(B, "first")), 1),
        (lambda engine: RbdLimits(engine.place).set_limits(B, volumes.IoLimits(write_iops=100)), 1),
        (lambda engine: engine.background._flatten(B, b""), 1),
        (lambda engine: engine.delete(D), 1),
    ],
    ids=["growth", "clone", "removal", "limits", "flattening", "clearing"],
)
def test_no_change_breaks_the_lock_of_a_client_that_falls_silent_after_it_was_asked(
    engine: RbdProvisioning,
    ceph: CephCluster,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[RbdProvisioning], None],
    questions: int,
) -> None:
    engine.create(A, SIZE)
    engine.clone(B, A, source_bytes=SIZE, size_bytes=SIZE)
    engine.take_snapshot(_snapshot(B, "first"))
    _leave_clone_begun(engine, B, D)
    monkeypatch.setattr(background, "SOFT_DEPTH", 0)
    with writer.running(ceph, namespace, B) as client:
        owners = _lock_owners(engine, B)
        with client.frozen(), monkeypatch.context() as patch:
            _answered_before(patch, questions)
            with pytest.raises(RbdClientSilent):
                change(engine)
            assert _lock_owners(engine, B) == owners
        client.write(b"it goes on")


def _leave_clone_begun(engine: RbdProvisioning, source: str, target: volumes.VolumeId) -> None:
    """What a controller leaves that is killed before it has cloned its temporary snapshot."""
    with engine.place.ioctx("cannot note") as ioctx:
        omap.put(ioctx, copies.WORK, {f"clone.{target}": source.encode()})
        engine.copies._snapshot(ioctx, source, f"clone-{target}", SIZE)


def test_lock_is_not_broken_while_no_monitor_can_end_the_change(
    engine: RbdProvisioning, ceph: CephCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librbd needs the monitors, too: it blocklists before it breaks."""
    engine.create(A, SIZE)
    with writer.running(ceph, namespace, A) as client:
        owners = _lock_owners(engine, A)
        with client.frozen(), ceph.mon.frozen(), monkeypatch.context() as patch:
            _answered_before(patch)
            with pytest.raises(errors.CrustError):
                engine.take_snapshot(_snapshot(A, "while it is paused"))
        assert _lock_owners(engine, A) == owners
        client.write(b"it goes on")


def test_change_during_which_this_process_slept_is_not_taken_for_done(
    engine: RbdProvisioning, ceph: CephCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile a client may have fallen silent, and librbd may break its lock before it is asked again."""
    engine.create(A, SIZE)
    real = image_use.now_s
    with writer.running(ceph, namespace, A), engine.place.ioctx("cannot change") as ioctx:
        with image_change.changing(engine.place, ioctx, A):
            pass
        with (
            monkeypatch.context() as patch,
            pytest.raises(RbdClientSilent),
            image_change.changing(engine.place, ioctx, A),
        ):
            patch.setattr(image_use, "now_s", lambda: real() + image_change.KEPT_S)


def test_silent_controller_is_told_from_a_silent_guest(
    engine: RbdProvisioning, ceph: CephCluster, namespace: str
) -> None:
    engine.create(A, SIZE)
    with writer.running(ceph, namespace, A) as client:
        with engine.place.ioctx("cannot look") as ioctx, engine.place.image(ioctx, A) as image:
            (address,) = image_use.watchers(image)
        with client.frozen():
            with pytest.raises(RbdClientSilent, match=f"{address} of a virtual machine") as guest:
                engine.grow(A, 2 * SIZE)
            with (
                engine.place.ioctx("cannot note") as ioctx,
                own_clients.noted(ioctx, A, address),
                pytest.raises(RbdClientSilent, match=f"{address} of a controller") as controller,
            ):
                engine.grow(A, 2 * SIZE)
    assert "crust ceph fence" in (guest.value.hint or "")
    assert "crust ceph fence" not in (controller.value.hint or "")
    assert "killed" in (controller.value.hint or "")


def test_stop_leaves_what_takes_too_long_and_the_next_start_does_it(
    engine: RbdProvisioning, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create(A, SIZE)
    engine.delete(A)
    reached, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        reached.set()
        assert go_on.wait(60)

    first = engine.background
    with monkeypatch.context() as patch:
        patch.setattr(BackgroundWork, "_remove", slow)
        first.start()
        left_behind = first._thread
        assert reached.wait(60)
        assert "from the trash" in first.stop(limit_s=0)
    assert first.stop() == "", "it is idempotent"
    provisioning(engine.place).background.look()
    assert not _trash(engine)
    go_on.set()
    assert left_behind is not None
    left_behind.join(60)
    assert not left_behind.is_alive()


def test_flattening_that_was_cut_off_in_the_middle_is_done_again_by_the_next(
    engine: RbdProvisioning,
    guest: Any,
    ceph: CephCluster,
    controller: CephUser,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 128 * OBJECT
    engine.create(A, size)
    _write(guest, A, b"x" * size)
    engine.clone(B, A, source_bytes=size, size_bytes=size)
    with engine.place.ioctx("cannot put") as ioctx:
        engine.copies._put_flatten(ioctx, B)
    monkeypatch.setattr(copies, "SOFT_DEPTH", 0)
    monkeypatch.setattr(background, "SOFT_DEPTH", 0)
    other = Connection(controller, QUICK)
    try:
        dying = provisioning(Place(other, POOL, namespace))
        with ThreadPoolExecutor(1) as threads:
            flattening = threads.submit(dying.background.look)
            _wait_until_copied(guest, B)
            ceph.command("osd blocklist", blocklistop="add", addr=other.address())
            with pytest.raises(errors.CrustError):
                flattening.result(60)
    finally:
        other.close()
    engine.background.look()
    with engine.place.ioctx("cannot look") as ioctx:
        assert engine.copies.depth(ioctx, B) == 0
    read = _read(guest, B, size)
    lost = [at for at in range(0, size, OBJECT) if read[at : at + OBJECT] != b"x" * OBJECT]
    assert lost == []


def _wait_until_copied(ioctx: Any, name: str) -> None:
    """Until the clone has an object of its own."""
    import rbd

    with rbd.Image(ioctx, name, read_only=True) as image:
        prefix = image.block_name_prefix()
    while not any(each.key.startswith(prefix) for each in ioctx.list_objects()):
        pass


def test_clone_is_flattened_while_a_guest_has_it_and_keeps_its_object_map(
    engine: RbdProvisioning,
    guest: Any,
    ceph: CephCluster,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.create(A, SIZE)
    _write(guest, A, b"x" * SIZE)
    engine.clone(B, A, source_bytes=SIZE, size_bytes=SIZE)
    with engine.place.ioctx("cannot put") as ioctx:
        engine.copies._put_flatten(ioctx, B)
    monkeypatch.setattr(background, "SOFT_DEPTH", 0)
    with writer.running(ceph, namespace, B) as client:
        engine.background.look()
        client.write(b"it goes on")
    assert _read(guest, B, SIZE) == b"it goes on" + b"x" * (SIZE - 10)
    with engine.place.ioctx("cannot look") as ioctx, engine.place.image(ioctx, B) as image:
        assert image.features() & features() == features()
        assert image.flags() == 0
        assert engine.copies.depth(ioctx, B) == 0


def test_copy_that_was_begun_is_flattened_only_when_it_is_complete(
    engine: RbdProvisioning, guest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry knows it by its parent: one with data and without a parent is somebody else's."""
    engine.create(A, SIZE)
    _write(guest, A, b"deep")
    monkeypatch.setattr(copies, "SOFT_DEPTH", 0)
    monkeypatch.setattr(background, "SOFT_DEPTH", 0)
    with monkeypatch.context() as killed:
        killed.setattr(images.VolumeImages, "finish", _killed)
        with pytest.raises(_Killed):
            engine.clone(B, A, source_bytes=SIZE, size_bytes=SIZE)
    engine.background.look()
    engine.clone(B, A, source_bytes=SIZE, size_bytes=SIZE)
    assert _read(guest, B, 4) == b"deep"
    engine.background.look()
    with engine.place.ioctx("cannot look") as ioctx:
        assert engine.copies.depth(ioctx, B) == 0


class _Killed(BaseException):
    """The process dies here."""


def _killed(*_: object) -> None:
    raise _Killed
