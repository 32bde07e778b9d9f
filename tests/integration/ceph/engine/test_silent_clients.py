"""Clients that have an image open and do not answer: no change breaks their lock, on a real cluster."""

import contextlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import rbd

from crust.blockdriver.ceph import controller_lock
from crust.blockdriver.ceph.binding import CephImageBusy
from crust.blockdriver.ceph.connection import EXPIRY_S
from crust.blockdriver.engines.rbd.provisioning import copies, image_use
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.blockdriver.engines.rbd.provisioning.image_use import RbdClientSilent
from crust.core import errors, volumes
from examples.cluster.ceph_cluster import CephCluster
from tests.support.ceph import rbd_writer as writer
from tests.support.ceph.rbd_images import (
    SIZE,
    A,
    B,
    C,
    D,
    clone,
    create,
    drop,
    lock_owners,
    restore,
    snapshot_of,
    take,
    wait_until_forgotten,
)


def test_silent_client_is_not_cut_off_by_a_change(
    engine: RbdProvisioning, ceph: CephCluster, namespace: str
) -> None:
    """librbd would treat it as dead after 30 s, break its lock and blocklist it."""
    create(engine, A, SIZE)
    snapshot = snapshot_of(A, "while it is paused")
    with writer.running(ceph, namespace, A) as client:
        with client.frozen(), pytest.raises(RbdClientSilent, match="127"):
            take(engine, snapshot)
        take(engine, snapshot)
        client.write(b"it goes on")
    assert engine.snapshot_ids() == frozenset({snapshot.snapshot_id})


def _until_not_busy(change: Callable[[], None]) -> None:
    """Repeat what is UNAVAILABLE, as a CO does: the client hears a little later of what was undone meanwhile."""
    for _ in range(100):
        with contextlib.suppress(CephImageBusy):
            return change()
    return change()


@contextlib.contextmanager
def falling_silent(
    client: writer.Writer, patch: pytest.MonkeyPatch, questions: int = 1
) -> Iterator[None]:
    """The client is frozen while the block runs, which seems to have got its answer to so many questions."""
    first, real = iter([True] * questions), image_use.answer
    with client.frozen(), patch.context() as patched:
        patched.setattr(image_use, "answer", lambda *asked: next(first, False) or real(*asked))
        yield


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_client_silent_after_its_question_keeps_its_lock(
    engine: RbdProvisioning,
    ceph: CephCluster,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_forgotten: bool,
) -> None:
    """librbd would break its lock after 30 s; a client without its lock is blocklisted, or hangs when it wakes up."""
    create(engine, A, SIZE)
    snapshot = snapshot_of(A, "while it is paused")
    with writer.running(ceph, namespace, A) as client:
        owners, address = lock_owners(engine, A), engine.place.connection.address()
        with falling_silent(client, monkeypatch):
            with pytest.raises(RbdClientSilent):
                take(engine, snapshot)
            if is_forgotten:
                wait_until_forgotten(engine, A)
            assert lock_owners(engine, A) == owners
        client.write(b"it goes on")
        _until_not_busy(lambda: take(engine, snapshot))
        restore(engine, B, snapshot, SIZE)
        client.write(b"later")
        assert lock_owners(engine, A) == owners
    with engine.place.ioctx("cannot read") as ioctx, engine.place.image(ioctx, B) as image:
        assert image.read(0, 10) == b"it goes on"
    # an administrator finds in the log which entries of the blocklist were the controller's own
    named = [
        vars(record).get("client") for record in caplog.records if "is ended" in record.message
    ]
    assert named == [address]
    assert address in ceph.command("osd blocklist ls").decode()


@pytest.mark.parametrize(
    ("change", "questions"),
    [
        (lambda engine: engine.grow(B, 2 * SIZE), 1),
        (lambda engine: clone(engine, C, B, source_bytes=SIZE, size_bytes=SIZE), 2),
        (lambda engine: drop(engine, snapshot_of(B, "first")), 1),
        (lambda engine: engine.set_limits(B, volumes.IoLimits(write_iops=100)), 1),
        (lambda engine: engine.background._flatten(B, b""), 1),
        (lambda engine: engine.remove(D), 1),
    ],
    ids=["growth", "clone", "removal", "limits", "flattening", "clearing"],
)
def test_lock_of_client_silent_during_a_change_is_not_broken(
    engine: RbdProvisioning,
    ceph: CephCluster,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[RbdProvisioning], None],
    questions: int,
) -> None:
    create(engine, A, SIZE)
    clone(engine, B, A, source_bytes=SIZE, size_bytes=SIZE)
    take(engine, snapshot_of(B, "first"))
    # what a controller leaves that is killed before it has cloned its temporary snapshot
    engine.volume_records.begin(D, B.encode())
    with (
        engine.place.ioctx("cannot note") as ioctx,
        image_use.changing(engine.place, ioctx, B) as image,
    ):
        image.create_snap(copies._snapshot_for(D))
    monkeypatch.setattr(copies, "SOFT_DEPTH", 0)
    with writer.running(ceph, namespace, B) as client:
        owners = lock_owners(engine, B)
        with falling_silent(client, monkeypatch, questions):
            with pytest.raises(RbdClientSilent):
                change(engine)
            assert lock_owners(engine, B) == owners
        client.write(b"it goes on")


def test_lock_is_not_broken_while_no_monitor_can_end_change(
    engine: RbdProvisioning, ceph: CephCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librbd needs the monitors, too: it blocklists before it breaks."""
    create(engine, A, SIZE)
    with writer.running(ceph, namespace, A) as client:
        owners = lock_owners(engine, A)
        with (
            falling_silent(client, monkeypatch),
            ceph.mon.frozen(),
            pytest.raises(errors.CrustError),
        ):
            take(engine, snapshot_of(A, "while it is paused"))
        assert lock_owners(engine, A) == owners
        client.write(b"it goes on")


def test_change_during_pause_of_this_process_is_not_done(
    engine: RbdProvisioning, ceph: CephCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile a client may have fallen silent, and librbd may break its lock before it is asked again."""
    create(engine, A, SIZE)
    real = image_use.now_s
    with writer.running(ceph, namespace, A), engine.place.ioctx("cannot change") as ioctx:
        with image_use.changing(engine.place, ioctx, A):
            pass
        with (
            monkeypatch.context() as patch,
            pytest.raises(RbdClientSilent),
            image_use.changing(engine.place, ioctx, A),
        ):
            patch.setattr(image_use, "now_s", lambda: real() + image_use.KEPT_S)


def test_lock_taken_from_client_leaves_it_blocklisted_for_years(
    engine: RbdProvisioning, ceph: CephCluster, guest: Any
) -> None:
    """librbd blocklists whose lock it breaks, and for an hour: who sleeps for longer would write again after that."""
    create(engine, A, SIZE)
    # it cannot be closed any more
    with (
        contextlib.suppress(rbd.Error),
        rbd.Image(guest, A) as image,
    ):
        image.write(b"it has the lock", 0)
        (address,) = lock_owners(engine, A)
        with engine.place.connection.cluster("cannot cut it off") as cluster:
            cluster.blocklist_add(address, EXPIRY_S)
        wait_until_forgotten(engine, A)
        engine.grow(A, 2 * SIZE)
    assert engine.image_bytes(A) == 2 * SIZE
    lines = ceph.command("osd blocklist ls").decode().splitlines()
    entries = (line.split() for line in lines)
    [ends] = [datetime.fromisoformat(text) for name, text in entries if name == address]
    assert ends - datetime.now(UTC) > timedelta(seconds=EXPIRY_S / 2)


def test_controller_cut_off_by_itself_records_its_new_address_first(
    engine: RbdProvisioning, ceph: CephCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor would blocklist the old one, and the new one would go on beside it."""
    create(engine, A, SIZE)
    before = engine.place.connection.address()
    with writer.running(ceph, namespace, A) as client:
        with falling_silent(client, monkeypatch), pytest.raises(RbdClientSilent):
            take(engine, snapshot_of(A, "while it is paused"))
        after = engine.place.connection.address()
        with engine.place.ioctx("cannot read") as ioctx:
            assert controller_lock.read(ioctx).split()[0] == after != before
        engine.grow(A, 2 * SIZE)
