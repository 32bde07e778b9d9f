"""The deferred volumes of this node: the handoff directory, with an in-memory index for fast queries.

The proxy is the only process that writes records, so the index is exact while the proxy runs. A scan rebuilds it at
the start and after each hint of the watch. Code that changes the directory reads the directory first, not the index.
"""

import asyncio
import datetime
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from crust import errors, metrics, volumes
from crust.handoff import store as stores
from crust.handoff.record import Record
from crust.proxy import reservations

Shared = volumes.VolumeKey | volumes.DeviceIdentity
"""A key that two publishes may share; then only one of them may write."""

Holder = tuple[str, datetime.datetime | None]
"""A sandbox and the time of its claim; the name is empty until the sandbox has written claim.json."""


class NoDeferredVolume(errors.NotFound):
    """No deferred volume is published at the target path."""

    def __init__(self, target: str) -> None:
        super().__init__(
            f"no deferred volume is published at {target}",
            why="the handoff directory has no entry for it",
            hint="publish it with deferral first",
        )


class TargetOfOtherVolume(errors.InvalidRequest):
    """Another volume than the request names is published at the target path."""

    def __init__(self, target: str, asked: volumes.VolumeKey, there: volumes.VolumeKey) -> None:
        super().__init__(
            f"the request for volume {asked} names the target {target}",
            why=f"volume {there} is published there",
            hint="the caller confuses two volumes; check its records before retrying",
        )


class DeferredVolumes:
    """The deferred volumes of this node. Constructed with an open store; call `load` first."""

    def __init__(self, store: stores.Store) -> None:
        self.store = store
        self._known: dict[str, Record] = {}
        self._sharing: dict[Shared, dict[str, Record]] = defaultdict(dict)
        self._numbers: Counter[volumes.DriverName] = Counter()
        self._reserved: list[reservations.Reservation] = []
        self._unreadable: dict[str, errors.CrustError] = {}
        self._changes = 0
        self._rewriting = threading.Lock()
        self.unfinished: set[str] = set()
        """Targets where a failed publish may have left something: their unpublish is the proxy's, whatever is there.

        After a start these are all that carry a guard.
        """

    async def load(self) -> tuple[stores.Entry, ...]:
        """Scan the directory and rebuild the index; returns all entries, unreadable ones included."""
        while True:
            changes = self._changes
            entries = await asyncio.to_thread(self.store.scan)
            if changes == self._changes:  # otherwise the scan may have missed a publish
                break
        readable = [entry.record for entry in entries if entry.record is not None]
        for target in tuple(self._known):
            self._drop(target)
        for record in readable:
            self._put(record)
        self._unreadable = {
            entry.digest: entry.error for entry in entries if entry.error is not None
        }
        return entries

    def find(self, target: str) -> Record | None:
        """The record for a target path, None if it is not deferred.

        Raises the error (`errors.Corrupt`) of an unreadable entry: an unknown volume is not an absent one, and the
        host must not mount it.
        """
        record = self._known.get(target)
        if record is None and self._unreadable:
            error = self._unreadable.get(volumes.TargetPath(target).digest)
            if error is not None:
                raise error
        return record

    def expect(self, target: str) -> Record:
        """The record for a target path; raises `NoDeferredVolume`."""
        record = self.find(target)
        if record is None:
            raise NoDeferredVolume(target)
        return record

    def all(self) -> tuple[Record, ...]:
        """Every readable record."""
        return tuple(self._known.values())

    def of_volume(self, key: volumes.VolumeKey) -> tuple[Record, ...]:
        """The records of one volume."""
        return tuple(self._sharing[key].values()) if key in self._sharing else ()

    def check_key(self, record: Record, key: volumes.VolumeKey) -> None:
        """Raise `TargetOfOtherVolume` unless the record is the volume's."""
        if record.key != key:
            raise TargetOfOtherVolume(record.target.text, key, record.key)

    def check_unreserved(self, wanted: reservations.Reservation, *, deferred: bool = True) -> None:
        """Raise `reservations.DeviceReserved` if another target holds the device."""
        sharing = [self._sharing[each] for each in _shared(wanted) if each in self._sharing]
        held = (reservations.of(record) for records in sharing for record in records.values())
        reservations.check(wanted, (*held, *self._reserved), deferred=deferred)

    @contextmanager
    def reserved(self, record: Record) -> Iterator[None]:
        """Reserve the record's device while its entry is created: another volume may name the same device.

        Raises `reservations.DeviceReserved` as `admit` does.
        """
        reservation = reservations.of(record)
        self.check_unreserved(reservation)
        self._reserved.append(reservation)
        try:
            yield
        finally:
            self._reserved.remove(reservation)

    def publish(self, record: Record) -> Record:
        """Publish the entry to the runtime; returns the record that exists afterwards. Blocks.

        Publishing the same content again changes nothing. If only the device differs (attached again, grown), the
        record is replaced; while a sandbox has the volume, only the size may differ. The limits stay: only
        `change_limits` changes them, and a retry may bring older ones. Raises `EntryDiffers` if the target is
        published otherwise, `HeldBySandbox`.
        """
        if self.store.read(record.target) is None:
            return self.store.create(record).require()
        with self._rewriting:
            return self._publish_again(record)

    async def change_limits(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> None:
        """Write new limits into a published volume's record. Raises `NoDeferredVolume`."""
        await self._change(target, lambda mount: replace(mount, io_limits=limits))

    async def change_capacity(self, target: volumes.TargetPath, size_bytes: int) -> None:
        """Write the new size into a published volume's record. Raises `NoDeferredVolume`."""
        await self._change(target, lambda mount: replace(mount, capacity_bytes=size_bytes))

    async def is_claimed(self, record: Record) -> bool:
        """Whether a sandbox has claimed the volume, or is claiming it."""
        return await self.holder(record) is not None

    async def holder(self, record: Record) -> Holder | None:
        """The sandbox that has claimed the volume, or is claiming it. Equal results mean the same sandbox."""
        entry = await asyncio.to_thread(self.store.read, record.target)
        if entry is None or entry.claim is None or not entry.live:
            return None
        return entry.claim.sandbox_id, entry.claim.claimed_at

    def remember(self, record: Record) -> None:
        """Add a published record to the index."""
        self._drop(record.target.text)
        self._put(record)
        self._changes += 1

    def forget(self, target: str) -> None:
        """Remove an unpublished record from the index."""
        self._drop(target)
        self._changes += 1

    async def _change(
        self,
        target: volumes.TargetPath,
        change: Callable[[volumes.DeferredMount], volumes.DeferredMount],
    ) -> None:
        record = await asyncio.to_thread(self._rewrite, target, change)
        known = self._known.get(target.text)
        # Meanwhile the volume may have been unpublished, or its record changed again.
        if known is not None and known.generation <= record.generation:
            self.remember(record)

    def _rewrite(
        self,
        target: volumes.TargetPath,
        change: Callable[[volumes.DeferredMount], volumes.DeferredMount],
    ) -> Record:
        """Change the record that is on disk now, not one that was read before: it may have changed since."""
        with self._rewriting:
            entry = self.store.read(target)
            if entry is None:
                raise NoDeferredVolume(target.text)
            there = entry.require()
            mount = change(there.mount)
            if mount == there.mount:
                return there
            return self.store.rewrite(replace(there, mount=mount)).require()

    def _publish_again(self, record: Record) -> Record:
        entry = self.store.read(record.target)
        if entry is None:
            return self.store.create(record).require()
        there = entry.require()
        same_request = there.same_request(record)
        if same_request:
            limits = there.mount.io_limits
            record = replace(record, mount=replace(record.mount, io_limits=limits))
        if entry.live and same_request and there.identity == record.identity:
            return there if there.same_content(record) else self.store.rewrite(record).require()
        return self.store.publish(record, replace=same_request).require()

    def _put(self, record: Record) -> None:
        self._known[record.target.text] = record
        driver = record.key.driver
        if driver not in self._numbers:
            # computed when the metrics are read, not at every publish
            metrics.deferred_volumes.labels(driver).set_function(lambda: self._numbers[driver])
        self._numbers[driver] += 1
        for each in _shared(reservations.of(record)):
            self._sharing[each][record.target.text] = record

    def _drop(self, target: str) -> None:
        record = self._known.pop(target, None)
        if record is None:
            return
        self._numbers[record.key.driver] -= 1
        for each in _shared(reservations.of(record)):
            del self._sharing[each][target]
            if not self._sharing[each]:
                del self._sharing[each]


def _shared(reservation: reservations.Reservation) -> tuple[Shared, ...]:
    if reservation.identity is None:
        return (reservation.key,)
    return reservation.key, reservation.identity
