"""Killed, or out of space, at any system call: readers see a complete entry or none, and a retry succeeds."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.handoff import claims, layout
from crust.handoff.store import Store
from crust.host import answers
from crust.host.process import processes
from tests.support.faults import crashes, lies, syncs
from tests.support.records.records import TARGET, a_record

RECORD = a_record()
GROWN = a_record(capacity_bytes=2 << 30)
CLAIM = claims.Claim(
    "sandbox-1", "kata", claims.State.MOUNTED, "", 1, RECORD.crust.published_at, live=True
)


class Stores:
    """A fresh store for each point."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, number: int) -> Store:
        return Store(f"{self._root}/{number}/volumes")

    def empty(self, number: int) -> None:
        self(number).open()

    def publish(self, number: int) -> None:
        self(number).write(RECORD)

    def rewrite(self, number: int) -> None:
        store = self(number)
        entry = store.read(TARGET)
        assert entry is not None
        store.rewrite(entry, GROWN.mount)

    def published(self, number: int) -> None:
        self.empty(number)
        self.publish(number)


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path)


def _names(store: Store) -> list[str]:
    return sorted(os.listdir(store.root))


def _unpublish(store: Store) -> None:
    try:
        with store.begin_removal(TARGET) as unpublish:
            unpublish.complete()
    except claims.NotPublished:
        return


@pytest.mark.spec("H-14")
def test_publish_killed_anywhere_leaves_complete_entry_or_none(stores: Stores) -> None:
    points = 0
    for number in crashes.crash_points(stores.empty, stores.publish):
        points += 1
        store = stores(number)
        entry = store.read(TARGET)
        assert entry is None or entry.record == RECORD
        assert store.scan() == (() if entry is None else (entry,))
        assert store.remove_orphans() == ()
        assert store.write(RECORD).record == RECORD
        assert _names(store) == [TARGET.digest]
        claims.ClaimLock.acquire(store.layout.entry(TARGET), TARGET).close()
    assert points > 8


@pytest.mark.spec("H-16")
def test_rewrite_killed_anywhere_leaves_old_or_new_record(stores: Stores) -> None:
    seen = set()
    for number in crashes.crash_points(stores.published, stores.rewrite):
        store = stores(number)
        entry = store.read(TARGET)
        assert entry is not None
        seen.add(entry.require().mount.capacity_bytes)
        assert entry.require().mount in (RECORD.mount, GROWN.mount)
        assert store.rewrite(entry, GROWN.mount).require().mount == GROWN.mount
        _unpublish(store)
        assert _names(store) == []
    assert len(seen) == 2


@pytest.mark.spec("H-18")
def test_unpublish_killed_anywhere_leaves_the_entry_or_none(stores: Stores) -> None:
    def claimed(number: int) -> None:
        stores.published(number)
        claims.write(stores(number).layout.entry(TARGET), CLAIM)

    outcomes = set()
    for number in crashes.crash_points(claimed, lambda n: _unpublish(stores(n))):
        store = stores(number)
        entry = store.read(TARGET)
        outcomes.add(entry is None)
        assert entry is None or (entry.record == RECORD and not entry.live)
        _unpublish(store)
        store.remove_orphans()
        assert _names(store) == []
    assert outcomes == {True, False}


def test_unpublish_killed_anywhere_leaves_entry_or_target_cleared_later(
    stores: Stores, tmp_path: Path
) -> None:
    def targets_file(number: int) -> Path:
        return tmp_path / f"target-{number}"

    def published(number: int) -> None:
        stores.published(number)
        targets_file(number).touch()

    def unpublish(number: int) -> None:
        with stores(number).begin_removal(TARGET) as entry:
            entry.complete(lambda: os.unlink(targets_file(number)))

    kept = set()
    for number in crashes.crash_points(published, unpublish):
        store, file = stores(number), targets_file(number)
        entry = store.read(TARGET)
        assert entry is None or file.exists(), "an entry without its guard"
        kept.add((entry is not None, file.exists()))
        cleared: list[volumes.TargetPath] = []
        store.remove_orphans(cleared.append)
        assert cleared == ([TARGET] if entry is None and file.exists() else cleared)
        assert _names(store) == ([] if entry is None else [TARGET.digest])
    assert kept == {(True, True), (False, True), (False, False)}


def test_unpublish_whose_target_cannot_be_cleared_restores_the_entry(stores: Stores) -> None:
    def fail(*_: object) -> None:
        raise errors.Conflict("busy")

    stores.published(0)
    store = stores(0)
    with (
        syncs.recorded() as steps,
        store.begin_removal(TARGET) as removal,
        pytest.raises(errors.Conflict),
    ):
        removal.complete(fail)
    directory = store.layout.entry(TARGET).directory
    assert steps[-2:] == [("name", directory), ("sync", store.root)]  # back for good
    entry = store.read(TARGET)
    assert entry is not None
    assert entry.record == RECORD
    _leave_uncleared(store)
    assert store.remove_orphans(fail) == ()
    assert store.scan() == (entry,)
    claims.ClaimLock.acquire(store.layout.entry(TARGET), TARGET).close()


def test_interrupted_unpublish_whose_record_is_not_seen_restores_the_entry(stores: Stores) -> None:
    """Without the record nobody knows the target, whose guard mount would stay."""
    stores.published(0)
    store = stores(0)
    _leave_uncleared(store)
    (gone,) = (name for name in os.listdir(store.root) if name.startswith(".gone-"))
    record = lies.Concerns(frozenset({f"{store.root}/{gone}/{layout.RECORD}"}), ())
    cleared: list[volumes.TargetPath] = []
    with lies.failing(record, lies.Failure(0, errno.EIO)):
        assert store.remove_orphans(cleared.append) == ()
    (entry,) = store.scan()
    assert (entry.record, cleared) == (RECORD, [])


def test_target_that_was_published_again_is_not_cleared(stores: Stores) -> None:
    stores.published(0)
    store = stores(0)
    _leave_uncleared(store)
    again = store.write(RECORD)
    cleared: list[volumes.TargetPath] = []
    assert store.remove_orphans(cleared.append) == ()
    assert cleared == []
    assert store.scan() == (again,)


def _leave_uncleared(store: Store) -> None:
    directory = store.layout.entry(TARGET).directory
    os.rename(directory, store.layout.new_gone(TARGET.digest, is_target_clear=False))


def test_claim_write_killed_anywhere_leaves_no_live_claim(stores: Stores) -> None:
    def claim(number: int) -> None:
        paths = stores(number).layout.entry(TARGET)
        with claims.ClaimLock.acquire(paths, TARGET):
            claims.write(paths, CLAIM)

    for number in crashes.crash_points(stores.published, claim):
        store = stores(number)
        read = claims.read(store.layout.entry(TARGET))
        assert read is None or (read.sandbox_id == "sandbox-1" and not read.live)
        claim(number)
        assert claims.read(store.layout.entry(TARGET)) is not None
        _unpublish(store)
        assert _names(store) == []


@pytest.mark.spec("H-22")
def test_dead_claim_survives_refused_claimants_killed_anywhere(stores: Stores) -> None:
    """Its process runs: whoever is killed where, the next one finds it."""
    process = answers.seen(processes.of(os.getpid()))
    dead = replace(CLAIM, process=process, live=False)

    def left(number: int) -> None:
        stores.published(number)
        claims.write(stores(number).layout.entry(TARGET), dead)

    def refused(number: int) -> None:
        paths = stores(number).layout.entry(TARGET)
        for _ in range(2):
            with (
                pytest.raises(claims.HypervisorLives),
                claims.ClaimLock.acquire(paths, TARGET) as lock,
            ):
                lock.check_ended(TARGET)

    points = 0
    for number in crashes.crash_points(left, refused):
        points += 1
        store = stores(number)
        assert claims.read(store.layout.entry(TARGET)) == dead
        with pytest.raises(claims.HypervisorLives):
            store.begin_removal(TARGET)
        assert claims.read(store.layout.entry(TARGET)) == dead
    assert points > 4


@pytest.mark.spec("H-46")
def test_claim_taken_again_survives_claimant_killed_anywhere(stores: Stores) -> None:
    process = answers.seen(processes.of(os.getpid()))
    dead = replace(CLAIM, process=process, live=False)

    def left(number: int) -> None:
        stores.published(number)
        claims.write(stores(number).layout.entry(TARGET), dead)

    def again(number: int) -> None:
        paths = stores(number).layout.entry(TARGET)
        with claims.ClaimLock.acquire(paths, TARGET) as lock:
            lock.check_ended(TARGET, but=process)
            claims.write(paths, dead)
            lock.settle()

    for number in crashes.crash_points(left, again):
        paths = stores(number).layout.entry(TARGET)
        assert claims.read(paths) == dead
        again(number)
        assert claims.read(paths) == dead
        assert not os.path.exists(paths.dead_claim)


def test_publish_without_space_leaves_no_partial_entry(stores: Stores) -> None:
    points = 0
    for number, error in crashes.failure_points(stores.empty, stores.publish):
        points += 1
        store = stores(number)
        assert isinstance(error, errors.Exhausted)
        entry = store.read(TARGET)
        assert entry is None or entry.record == RECORD
        store.remove_orphans()
        assert store.write(RECORD).record == RECORD
        assert _names(store) == [TARGET.digest]
    assert points > 8


def test_unpublish_failing_at_any_call_can_be_repeated(stores: Stores) -> None:
    for number, error in crashes.failure_points(stores.published, lambda n: _unpublish(stores(n))):
        store = stores(number)
        assert isinstance(error, errors.Exhausted)
        _unpublish(store)
        store.remove_orphans()
        assert _names(store) == []
