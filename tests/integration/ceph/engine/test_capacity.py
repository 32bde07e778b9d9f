"""The bytes that images have of their own, on a real cluster."""

from typing import Any

import pytest
import rbd

from crust.blockdriver.engines.rbd.provisioning import own_bytes
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from tests.support.ceph.rbd_images import A, B, clone, create, drop, snapshot_of, take, write
from tests.support.drivers.block_driver import MIB

SIZE = 64 * MIB


@pytest.fixture(autouse=True)
def _without_old_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_bytes, "STATISTICS_S", 0.0)


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
    assert own.least_bytes(1 << 50) == 2 * MIB, "the clone reads them"


def counted(engine: RbdProvisioning) -> tuple[int, int]:
    """The bytes that are own after a look, in mebibytes, and those of others that may be."""
    engine.own_bytes.look()
    unseen_bytes = engine.own_bytes.unseen_bytes(0)
    return engine.own_bytes.least_bytes(1 << 50) // MIB, unseen_bytes // MIB


def test_snapshot_has_what_its_volume_has_written_over(engine: RbdProvisioning, guest: Any) -> None:
    """Byte by byte, each byte once; of a deleted volume the youngest snapshot has all."""
    first, second = snapshot_of(A, "first"), snapshot_of(A, "second")
    create(engine, A, SIZE)
    write(guest, A, b"x" * 8 * MIB)
    take(engine, first)
    assert counted(engine) == (8, 0)
    write(guest, A, b"y" * MIB, MIB)
    assert counted(engine) == (9, 0)
    take(engine, second)
    write(guest, A, b"z" * 2 * MIB, MIB)
    write(guest, A, b"z" * MIB, 32 * MIB)
    assert counted(engine) == (12, 0)
    engine.remove(A)
    assert engine.own_bytes.least_bytes(1 << 50) == 3 * MIB, "the last look knows no more"
    assert counted(engine) == (9, 0)
    drop(engine, first)
    assert counted(engine) == (8, 0)
    drop(engine, second)
    assert engine.own_bytes.least_bytes(1 << 50) == 0


def test_deleted_snapshot_that_a_clone_reads_has_unseen_bytes(
    engine: RbdProvisioning, guest: Any
) -> None:
    """librbd does not say what its source has written over."""
    create(engine, A, SIZE)
    write(guest, A, b"x" * 8 * MIB)
    clone(engine, B, A, source_bytes=SIZE, size_bytes=SIZE)
    assert counted(engine) == (8, 0)
    write(guest, A, b"y" * MIB)
    assert counted(engine) == (8, 4)
    with rbd.Image(guest, A) as image:
        image.discard(4 * MIB, 4 * MIB)
    assert counted(engine) == (4, 8)
    engine.remove(A)
    assert counted(engine) == (8, 0)
