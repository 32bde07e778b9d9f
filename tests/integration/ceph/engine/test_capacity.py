"""The bytes that images have of their own, on a real cluster."""

from typing import Any

from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from tests.support.ceph.rbd_images import A, B, clone, create, write
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
