"""Clones of the engine on a real cluster, and the background work that makes them independent of their source."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from crust.blockdriver.engines.protocol import ImageMissing
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.provisioning import copies
from crust.blockdriver.engines.rbd.provisioning.copies import RbdMaking
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.blockdriver.engines.rbd.provisioning.images import features
from crust.blockdriver.engines.rbd.provisioning.snapshots import RbdSnapshots
from crust.ceph.connection import Connection
from crust.ceph.user import CephUser
from crust.core import errors
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.integration.ceph.conftest import QUICK
from tests.support.ceph import rbd_writer as writer
from tests.support.ceph.rbd_images import (
    OBJECT,
    SIZE,
    A,
    B,
    C,
    clone,
    create,
    names,
    read,
    trash,
    volume,
    write,
)
from tests.support.raised import raised


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


def test_image_of_a_deleted_volume_is_not_kept_for_a_killed_clone(
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


def test_deep_clones_are_flattened_in_the_background_and_too_deep_ones_wait(
    engine: RbdProvisioning, guest: Any
) -> None:
    chain = [volume(f"chain {each}") for each in range(copies.HARD_DEPTH + 2)]
    create(engine, chain[0], SIZE)
    write(guest, chain[0], b"deep")
    made = chain[:-1]
    for source, target in itertools.pairwise(made):
        clone(engine, target, source, source_bytes=SIZE, size_bytes=SIZE)
    with raised("CloneDepthReached"):
        clone(engine, chain[-1], made[-1], source_bytes=SIZE, size_bytes=SIZE)
    engine.background.look()
    with engine.place.ioctx("cannot look") as ioctx:
        depths = [copies.depth(engine.place, ioctx, each) for each in made]
    assert max(depths) <= copies.SOFT_DEPTH
    assert read(guest, made[-1], 4) == b"deep"
    clone(engine, chain[-1], made[-1], source_bytes=SIZE, size_bytes=SIZE)


def test_flattening_that_was_cut_off_in_the_middle_is_done_again_by_the_next(
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
        dying = RbdProvisioning(Place.of(other, POOL, namespace))
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
        assert copies.depth(engine.place, ioctx, B) == 0
    content = read(guest, B, size)
    lost = [at for at in range(0, size, OBJECT) if content[at : at + OBJECT] != b"x" * OBJECT]
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
        assert copies.depth(engine.place, ioctx, B) == 0


def test_copy_that_was_begun_is_flattened_only_when_it_is_complete(
    engine: RbdProvisioning, guest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry knows it by its parent: one with data and without a parent is somebody else's."""
    create(engine, A, SIZE)
    write(guest, A, b"deep")
    monkeypatch.setattr(copies, "SOFT_DEPTH", 0)
    with _killed_before(monkeypatch, RbdMaking, "_finish"):
        clone(engine, B, A, source_bytes=SIZE, size_bytes=SIZE)
    engine.background.look()
    clone(engine, B, A, source_bytes=SIZE, size_bytes=SIZE)
    assert read(guest, B, 4) == b"deep"
    engine.background.look()
    with engine.place.ioctx("cannot look") as ioctx:
        assert copies.depth(engine.place, ioctx, B) == 0


class _Killed(BaseException):
    """The process dies here."""


@contextmanager
def _killed_before(patch: pytest.MonkeyPatch, owner: object, step: str) -> Iterator[None]:
    """What the block does ends before `step` of `owner`."""

    def die(*_: object) -> None:
        raise _Killed

    with patch.context() as until_then:
        until_then.setattr(owner, step, die)
        with pytest.raises(_Killed):
            yield
