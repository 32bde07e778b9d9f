"""The bytes that images have of their own, on a real cluster."""

from typing import Any

from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from tests.support.ceph.rbd_images import A, B, clone, create, drop, snapshot_of, take, write
from tests.support.drivers.block_driver import MIB

SIZE = 64 * MIB


def test_own_bytes_are_those_that_images_hold(engine: RbdProvisioning, guest: Any) -> None:
    """A block of an object is not the whole object, and a clone has none of its parent's."""
    own = engine.own_bytes
    create(engine, A, SIZE)
    own.look()
    assert own.least_bytes(1 << 50) == 0
    write(guest, A, b"x" * MIB)
    own.look()
    assert own.least_bytes(1 << 50) == MIB
    clone(engine, B, A, source_bytes=SIZE, size_bytes=SIZE)
    own.look()
    assert own.least_bytes(1 << 50) == MIB
    write(guest, B, b"x" * MIB, 32 * MIB)
    own.look()
    assert own.least_bytes(1 << 50) == 2 * MIB
    engine.remove(A)
    assert own.least_bytes(1 << 50) == MIB
    own.look()
    assert own.least_bytes(1 << 50) == MIB


def test_blocks_that_a_snapshot_alone_has_are_no_volumes(
    engine: RbdProvisioning, guest: Any
) -> None:
    """The pool has them stored, so they count as others', and are promised to nobody."""
    own, taken = engine.own_bytes, snapshot_of(A, "taken")
    create(engine, A, SIZE)
    write(guest, A, b"x" * 4 * MIB)
    take(engine, taken)
    for length in (4 * MIB, MIB):
        write(guest, A, b"y" * length)
        own.look()
        assert own.least_bytes(1 << 50) == 4 * MIB
    with engine.place.ioctx("look") as ioctx, engine.place.image(ioctx, A) as image:
        held: list[int] = []
        image.set_snap(taken.snapshot_id)
        image.diff_iterate(
            *(0, SIZE, None, lambda _, length, exists: held.append(length * exists)),
            include_parent=False,
            whole_object=False,
        )
        assert sum(held) == 4 * MIB, "the snapshot has blocks of its own"
    drop(engine, taken)
