"""Images, snapshots and clones of the engine on a real cluster."""

import errno
import threading
from typing import Any

import pytest
import rbd

from crust.blockdriver.ceph import binding, claim_object, claims, omap
from crust.blockdriver.ceph.claim_object import Mode
from crust.blockdriver.engines.pool_access import RecordChanged
from crust.blockdriver.engines.protocol import ForeignImage, ImageMissing, StillAttached
from crust.blockdriver.engines.rbd.provisioning import images
from crust.blockdriver.engines.rbd.provisioning.background import BackgroundWork
from crust.blockdriver.engines.rbd.provisioning.copies import NewRbdVolume
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.blockdriver.engines.rbd.provisioning.images import MARK
from crust.blockdriver.engines.rbd.provisioning.librbd_objects import read_header
from crust.blockdriver.engines.rbd.records import RbdContentRecords, State
from crust.core import errors
from tests.support.ceph.intercepted import before_calls
from tests.support.ceph.rbd_images import (
    RECORDS,
    SIZE,
    A,
    B,
    ceph_text,
    create,
    drop,
    id_of,
    names,
    note_removal,
    read,
    snapshot_of,
    take,
    trash,
    write,
)
from tests.support.faults.crashes import Killed
from tests.support.raised import raised

REMOVALS = ("trash_move", "rename")


def test_volume_is_made_only_where_no_image_is(engine: RbdProvisioning, guest: Any) -> None:
    create(engine, A, SIZE)
    write(guest, A, b"data")
    with raised("OrphanImage"):
        create(engine, A, SIZE)
    assert (engine.image_bytes(A), engine.image_ids()) == (SIZE, frozenset({A}))
    assert read(guest, A, 4) == b"data"
    assert engine.image_problem(A, SIZE) == ""


def test_size_of_image_that_does_not_answer_is_not_zero(
    engine: RbdProvisioning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume without a readable record has its image's size reserved."""
    create(engine, A, SIZE)

    def failing(*args: Any, **options: Any) -> Any:
        raise rbd.OSError("error opening image", errno=errno.EIO)

    with monkeypatch.context() as patched:
        patched.setattr(rbd, "Image", failing)
        with pytest.raises(errors.CrustError, match=A):
            engine.image_bytes(A)
    assert engine.image_bytes(B) == 0
    assert "should have" in engine.image_problem(A, SIZE + 1)
    with pytest.raises(ImageMissing):
        engine.image_problem(B, SIZE)


@pytest.mark.parametrize("failure", [errors.NotReady("a failure"), KeyboardInterrupt()])
def test_volume_not_committed_is_removed_again_or_settled_after_kill(
    engine: RbdProvisioning, failure: BaseException
) -> None:
    def make() -> None:
        with engine.making(A) as making:
            making.create(SIZE)
            assert (engine.image_ids(), engine.unsettled()) == (frozenset(), (A,))
            raise failure

    with pytest.raises(type(failure)):
        make()
    if isinstance(failure, KeyboardInterrupt):
        assert (names(engine), engine.unsettled()) == ([A], (A,))
        engine.settle(A)
    assert (names(engine), engine.unsettled()) == ([], ())
    with engine.making(A) as making:
        making.create(SIZE)
    assert (names(engine), engine.unsettled()) == ([], ()), "without a commit"
    create(engine, A, 2 * SIZE)
    assert engine.image_bytes(A) == 2 * SIZE


def test_volume_noted_as_half_made_but_used_is_kept(engine: RbdProvisioning, guest: Any) -> None:
    """The note is of a backup."""
    content = RbdContentRecords(engine.place)
    create(engine, A, SIZE)
    write(guest, A, b"data")
    content.save(A, b"formatted", previous=b"its content")
    engine.volume_records.begin_removal(A, b"a volume", b"a volume")
    engine.volume_records.end(A)
    engine.volume_records.begin(A)
    for call in (engine.settle, engine.remove, lambda _: create(engine, A, SIZE)):
        with raised("CreatingVolumeUsed"):
            call(A)
    assert read(guest, A, 4) == b"data"
    assert content.load(A) == b"formatted"


def test_commit_after_the_volume_was_settled_is_refused(engine: RbdProvisioning) -> None:
    """It would be the record of a volume without an image."""

    def make() -> None:
        with engine.making(A) as making:
            making.create(SIZE)
            engine.settle(A)
            making.commit(RECORDS)

    with pytest.raises(RecordChanged):
        make()
    assert engine.volume_records.state(A) == State()
    assert names(engine) == []


def test_killed_removal_goes_on_unless_the_image_is_used(
    engine: RbdProvisioning, guest: Any
) -> None:
    create(engine, A, SIZE)
    note_removal(engine, A)
    assert (engine.image_ids(), engine.unsettled()) == (frozenset(), (A,))
    with rbd.Image(guest, A), pytest.raises(StillAttached):
        engine.settle(A)
    assert (engine.image_ids(), engine.unsettled()) == (frozenset({A}), ())
    assert engine.volume_records.state(A).record == b"a volume"
    note_removal(engine, A)
    engine.settle(A)
    assert (names(engine), engine.unsettled()) == ([], ())
    assert RbdContentRecords(engine.place).load(A) is None
    engine.settle(A)
    engine.remove(A)


def test_header_is_read_without_an_open_as_librbd_reads_it(
    engine: RbdProvisioning, guest: Any
) -> None:
    """By every client that may use the image: the mark, its absence, the size as it is now, and no image."""
    create(engine, A, SIZE)
    assert read_header(guest, A, MARK) == (SIZE, A)
    engine.grow(A, 2 * SIZE)
    with rbd.Image(guest, A) as image:
        image.metadata_set("other", "grüße")
        assert read_header(guest, A, MARK) == (image.size(), A)
    assert read_header(guest, A, "other") == (2 * SIZE, "grüße")
    assert read_header(guest, A, "none") == (2 * SIZE, "")
    assert read_header(guest, B, MARK) is None


def test_foreign_image_in_a_volumes_place_is_a_problem(engine: RbdProvisioning, guest: Any) -> None:
    rbd.RBD().create(guest, A, SIZE)
    assert "an image of that name is in" in engine.image_problem(A, SIZE)


def test_foreign_image_with_data_is_refused_and_kept(engine: RbdProvisioning, guest: Any) -> None:
    create(engine, B, SIZE)
    rbd.RBD().create(guest, A, SIZE)
    write(guest, A, b"somebody's")
    engine.volume_records.begin(A)
    with pytest.raises(ForeignImage):
        NewRbdVolume(engine, A).create(SIZE)
    with pytest.raises(ForeignImage):
        NewRbdVolume(engine, A).clone(B, source_bytes=SIZE, size_bytes=SIZE)
    assert read(guest, A, 10) == b"somebody's"


def test_image_without_a_header_is_recreated(engine: RbdProvisioning, guest: Any) -> None:
    """A create that was killed inside librbd leaves the name alone."""
    rbd.RBD().create(guest, A, SIZE)
    with rbd.Image(guest, A) as image:
        header = f"rbd_header.{image.id()}"
    guest.remove_object(header)
    engine.volume_records.begin(A)
    create(engine, A, SIZE)
    assert engine.image_bytes(A) == SIZE


@pytest.mark.parametrize("is_deleted_again", [True, False])
def test_name_whose_image_was_being_removed_is_created_again(
    engine: RbdProvisioning, guest: Any, *, is_deleted_again: bool
) -> None:
    """librbd removes the object of the name before its entry in the directory, and was killed in between."""
    rbd.RBD().create(guest, A, SIZE)
    guest.remove_object(f"rbd_id.{A}")
    assert A in rbd.RBD().list(guest)
    if is_deleted_again:
        note_removal(engine, A)
        engine.remove(A)
        assert A not in rbd.RBD().list(guest)
    create(engine, A, SIZE)
    assert engine.image_bytes(A) == SIZE
    assert A in rbd.RBD().list(guest)
    engine.remove(A)
    assert A not in rbd.RBD().list(guest)


@pytest.mark.parametrize("has_entry", [False, True])
def test_image_cut_off_on_its_way_to_trash_is_removed(
    engine: RbdProvisioning, guest: Any, *, has_entry: bool
) -> None:
    """librbd notes an image in the trash as moving, takes its name away, and was killed before it noted the end."""
    create(engine, A, SIZE)
    write(guest, A, b"data")
    engine.remove(A)
    [image_id] = [entry["id"] for entry in binding.load().images.trash_list(guest)]
    guest.execute("rbd_trash", "rbd", "trash_state_set", ceph_text(image_id) + b"\1\0")
    if has_entry:
        guest.execute("rbd_directory", "rbd", "dir_add_image", ceph_text(A) + ceph_text(image_id))
    engine.background.look()
    assert (trash(engine), names(engine)) == ([], [])
    assert not [known.key for known in guest.list_objects() if image_id in known.key]


def test_image_that_another_moves_to_the_trash_is_not_touched(
    engine: RbdProvisioning, guest: Any
) -> None:
    create(engine, A, SIZE)
    image_id = id_of(guest, A)
    engine.remove(A)
    guest.execute("rbd_trash", "rbd", "trash_state_set", ceph_text(image_id) + b"\1\0")
    guest.write_full(f"rbd_id.{A}", ceph_text(image_id))  # its name is not removed yet
    guest.execute("rbd_directory", "rbd", "dir_add_image", ceph_text(A) + ceph_text(image_id))
    engine.background.look()
    assert engine.image_bytes(A) == SIZE
    note_removal(engine, A)
    engine.remove(A)
    engine.background.look()
    assert (trash(engine), names(engine)) == ([], [])


def test_grow_never_shrinks(engine: RbdProvisioning) -> None:
    create(engine, A, SIZE)
    engine.grow(A, 2 * SIZE)
    engine.grow(A, SIZE)
    assert engine.image_bytes(A) == 2 * SIZE
    with pytest.raises(ImageMissing):
        engine.grow(B, SIZE)


def test_image_in_trash_can_be_restored_for_its_time(engine: RbdProvisioning, guest: Any) -> None:
    keeping = RbdProvisioning(engine.place, trash_keep_s=3600)
    create(keeping, A, SIZE)
    keeping.remove(A)
    create(keeping, B, SIZE)
    take(keeping, snapshot_of(B, "s"))
    keeping.remove(B)
    drop(keeping, snapshot_of(B, "s"))
    engine.background.look()
    entries = {entry["name"]: entry["id"] for entry in binding.load().images.trash_list(guest)}
    assert {images.volume_of(entry) for entry in entries} == {A, B}
    rbd.RBD().trash_restore(guest, entries[A], A)
    assert engine.image_bytes(A) == SIZE


@pytest.mark.parametrize(("name", "keep_s"), [("of-somebody", 0), (A, 7 * 86400)])
def test_what_others_have_put_into_the_trash_stays_there(
    engine: RbdProvisioning, guest: Any, name: str, keep_s: int
) -> None:
    rbd.RBD().create(guest, name, SIZE)
    rbd.RBD().trash_move(guest, name, keep_s)
    engine.background.look()
    assert trash(engine) == [name]


def test_image_that_the_controller_flattens_is_attached_and_deleted(
    engine: RbdProvisioning, guest: Any
) -> None:
    create(engine, A, SIZE)
    with (
        engine.place.ioctx("flatten") as ioctx,
        engine.place.image(ioctx, A, read_only=False) as image,
    ):
        image.write(b"x", 0)  # it has RBD's lock
        holder = claim(engine, guest)
        claims.give_back(engine.place.claimed(guest, A), holder.id)
        engine.remove(A)
    assert A not in engine.image_ids()


def claim(engine: RbdProvisioning, guest: Any) -> claim_object.Holder:
    """Take the image for a virtual machine."""
    host = claims.Host("node-a", "machine-a")
    return claims.take(engine.place.claimed(guest, A), Mode.WRITER, host, "sandbox", "vm")


@pytest.mark.parametrize("has_snapshot", [False, True], ids=["trash_move", "rename"])
def test_image_that_is_being_deleted_is_taken_by_nobody(
    engine: RbdProvisioning, guest: Any, monkeypatch: pytest.MonkeyPatch, *, has_snapshot: bool
) -> None:
    """To rename an image librbd does not look whether a client has it open."""
    create(engine, A, SIZE)
    if has_snapshot:
        take(engine, snapshot_of(A, "s"))
    refused = list[str]()

    def try_to_claim(called: str) -> None:
        if called not in REMOVALS:
            return
        with pytest.raises(claims.ImageClaimed, match="which deletes the volume") as caught:
            claim(engine, guest)
        refused.append(str(caught.value))

    with before_calls(monkeypatch, try_to_claim):
        engine.remove(A)
    assert len(refused) == 1
    create(engine, A, SIZE)
    claim(engine, guest)


def test_image_taken_right_before_its_deletion_stays_with_its_holder(
    engine: RbdProvisioning, guest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(engine, A, SIZE)
    swap = omap.swap

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(omap, "swap", swap)
        claim(engine, guest)
        return swap(*arguments)

    monkeypatch.setattr(omap, "swap", overtaken)
    with pytest.raises(StillAttached):
        engine.remove(A)
    [holder] = claim_object.read(guest, A).claims.holders
    assert holder.id == "vm"
    assert A in engine.image_ids()


def test_deletion_that_is_refused_leaves_the_image_to_be_taken(
    engine: RbdProvisioning, guest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was killed, and is refused when it is repeated."""
    create(engine, A, SIZE)

    def killed(called: str) -> None:
        if called in REMOVALS:
            raise Killed

    with before_calls(monkeypatch, killed), pytest.raises(Killed):
        engine.remove(A)
    with pytest.raises(claims.ImageClaimed):
        claim(engine, guest)
    with rbd.Image(guest, A), pytest.raises(StillAttached):
        engine.remove(A)
    claim(engine, guest)


def test_stop_leaves_long_work_to_the_next_start(
    engine: RbdProvisioning, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(engine, A, SIZE)
    engine.remove(A)
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
    RbdProvisioning(engine.place).background.look()
    assert not trash(engine)
    go_on.set()
    assert left_behind is not None
    left_behind.join(60)
    assert not left_behind.is_alive()
