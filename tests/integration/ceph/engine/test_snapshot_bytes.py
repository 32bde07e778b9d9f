"""The bytes that snapshots add to what a pool has promised, on a real cluster."""

from typing import Any

import pytest
import rbd

from crust.blockdriver.engines.pool_access import RecordKind
from crust.blockdriver.engines.protocol import Image
from crust.blockdriver.engines.rbd.provisioning import copies
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.core import errors
from examples.cluster.ceph_cluster import CephCluster
from tests.support.ceph.intercepted import before_calls
from tests.support.ceph.rbd_images import (
    OBJECT,
    SIZE,
    A,
    B,
    C,
    clone,
    create,
    drop,
    restore,
    snapshot_of,
    take,
    trash,
    write,
)

FIRST, SECOND, THIRD = (snapshot_of(A, name) for name in ("first", "second", "third"))
MAPS = rbd.RBD_FEATURE_OBJECT_MAP | rbd.RBD_FEATURE_FAST_DIFF


def total(engine: RbdProvisioning) -> int:
    """As it is kept, and as it is after all images were asked anew."""
    kept = engine.snapshot_bytes.total()
    engine.snapshot_bytes.ask_anew()
    assert engine.snapshot_bytes.total() == kept
    return kept


def take_as_announced(engine: RbdProvisioning, image: Image) -> int:
    """Take a snapshot; what it adds, as is said before it, while it is taken, and after it."""
    before = total(engine)
    announced = engine.added_bytes(image.volume_id)
    with engine.taking(image.snapshot_id, [image]) as taking:
        taking.take(image)
        assert taking.added_bytes() == announced
        assert total(engine) == before, "it is set aside meanwhile"
        taking.commit({RecordKind.SNAPSHOTS: b"a set"})
    assert total(engine) == before + announced
    return announced


def filled(engine: RbdProvisioning, guest: Any) -> None:
    """The volume A with two objects of four, of which one has a block only."""
    create(engine, A, SIZE)
    write(guest, A, b"x" * 4096)
    write(guest, A, b"x" * OBJECT, OBJECT)


def test_object_counts_once_however_many_snapshots_have_it(
    engine: RbdProvisioning, guest: Any
) -> None:
    filled(engine, guest)
    assert take_as_announced(engine, FIRST) == 2 * OBJECT
    write(guest, A, b"y" * 512)
    assert total(engine) == 2 * OBJECT
    assert take_as_announced(engine, SECOND) == OBJECT
    assert take_as_announced(engine, THIRD) == 0
    drop(engine, FIRST)
    assert total(engine) == 2 * OBJECT, "the second has them now"
    drop(engine, THIRD)
    assert total(engine) == 2 * OBJECT
    drop(engine, SECOND)
    assert total(engine) == 0
    assert engine.added_bytes(A) == 2 * OBJECT


def test_object_map_of_a_large_image_is_read_whole(engine: RbdProvisioning, guest: Any) -> None:
    """That of the largest image has 64 MiB."""
    create(engine, A, 1 << 40)
    write(guest, A, b"x", (1 << 40) - 1)
    assert take_as_announced(engine, FIRST) == OBJECT


def test_deleted_snapshot_counts_until_its_clone_is_gone(
    engine: RbdProvisioning, guest: Any
) -> None:
    """Also in an image that is kept for it, and in the trash."""
    filled(engine, guest)
    take(engine, FIRST)
    restore(engine, B, FIRST, SIZE)
    engine.remove(A)
    assert total(engine) == 2 * OBJECT
    drop(engine, FIRST)
    assert (total(engine), trash(engine)[0].startswith("deleted.")) == (2 * OBJECT, True)
    engine.remove(B)
    engine.background.look()
    engine.own_bytes.look()
    assert total(engine) == 0


def test_clone_needs_what_its_source_can_write_over(engine: RbdProvisioning, guest: Any) -> None:
    """Once: the next clone shares with the first what was not written since."""
    filled(engine, guest)
    for new, needed in ((B, 2 * OBJECT), (C, 0)):
        before = total(engine)
        assert engine.cloned_bytes(A) == needed
        clone(engine, new, A, source_bytes=SIZE, size_bytes=SIZE)
        assert total(engine) == before + needed
    write(guest, A, b"y")
    assert engine.added_bytes(A) == OBJECT
    assert engine.added_bytes(B) == 2 * OBJECT, "a write copies them from the parent"


def test_snapshot_of_clone_counts_what_a_write_copies_into_it(
    engine: RbdProvisioning, guest: Any
) -> None:
    """librbd gives a snapshot the parent's object when the clone is first written there, and when it is flattened."""
    filled(engine, guest)
    clone(engine, B, A, source_bytes=SIZE, size_bytes=2 * SIZE)
    of_source = total(engine)
    first, second = (snapshot_of(B, name) for name in ("first", "second"))
    assert take_as_announced(engine, first) == 2 * OBJECT
    assert take_as_announced(engine, second) == 0
    write(guest, B, b"y")
    assert total(engine) == of_source + 2 * OBJECT
    with rbd.Image(guest, B) as image:
        image.flatten()
    engine.own_bytes.look()
    assert total(engine) == 2 * OBJECT, "the deleted snapshot of the source has gone"
    drop(engine, first)
    assert total(engine) == 2 * OBJECT


def test_flattening_in_the_background_loses_no_byte(
    engine: RbdProvisioning, guest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves snapshots without a valid object map."""
    filled(engine, guest)
    clone(engine, B, A, source_bytes=SIZE, size_bytes=SIZE)
    of_source = total(engine)
    first, second = (snapshot_of(B, name) for name in ("first", "second"))
    take(engine, first)
    write(guest, B, b"y", 2 * OBJECT)
    take(engine, second)
    assert total(engine) == of_source + 3 * OBJECT
    monkeypatch.setattr(copies, "SOFT_DEPTH", 0)
    copies.put_flatten(guest, B)
    engine.background.look()
    engine.own_bytes.look()
    assert total(engine) == 3 * OBJECT
    assert engine.added_bytes(B) == 3 * OBJECT, "the image's new map has all as written"
    assert take_as_announced(engine, snapshot_of(B, "third")) == 3 * OBJECT
    write(guest, B, b"y")
    assert engine.added_bytes(B) == OBJECT


def test_image_without_object_map_is_looked_at_object_by_object(
    engine: RbdProvisioning, guest: Any
) -> None:
    filled(engine, guest)
    with rbd.Image(guest, A) as image:
        image.update_features(MAPS, enabled=False)
    assert take_as_announced(engine, FIRST) == 2 * OBJECT
    write(guest, A, b"y")
    assert take_as_announced(engine, SECOND) == OBJECT
    with rbd.Image(guest, A) as image:
        image.update_features(MAPS, enabled=True)
    assert total(engine) == 3 * OBJECT, "the new maps are not valid"


def test_unanswered_question_is_an_error_and_is_asked_again(
    engine: RbdProvisioning, guest: Any, ceph: CephCluster
) -> None:
    filled(engine, guest)
    take(engine, FIRST)
    with ceph.osd.frozen(), pytest.raises(errors.PeerUnavailable):
        engine.snapshot_bytes.total()
    assert engine.snapshot_bytes.total() == 2 * OBJECT


def test_space_asks_images_that_changed_alone(
    engine: RbdProvisioning, guest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question about the whole pool is the only one, however many snapshots there are."""
    filled(engine, guest)
    for taken in (FIRST, SECOND, THIRD):
        take(engine, taken)
    clone(engine, B, A, source_bytes=SIZE, size_bytes=SIZE)
    assert engine.space().snapshot_bytes == 2 * OBJECT
    calls: list[str] = []
    with before_calls(monkeypatch, calls.append):
        assert engine.space().snapshot_bytes == 2 * OBJECT
        assert calls == []
        take(engine, snapshot_of(B, "of the clone"))
        calls.clear()
        assert engine.space().snapshot_bytes == 4 * OBJECT
        assert calls.count("open") == 1


def test_snapshot_by_hand_counts_after_the_next_look(engine: RbdProvisioning, guest: Any) -> None:
    filled(engine, guest)
    assert engine.snapshot_bytes.total() == 0
    with rbd.Image(guest, A) as image:
        image.create_snap("by hand")
    engine.own_bytes.look()
    assert engine.snapshot_bytes.total() == 2 * OBJECT
    with rbd.Image(guest, A) as image:
        image.remove_snap("by hand")
    engine.own_bytes.look()
    assert engine.snapshot_bytes.total() == 0
