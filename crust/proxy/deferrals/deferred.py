"""The deferred volumes of this node: the one owner of what is written in the handoff directory.

Every change of an entry goes through here, as the only operation at its target, with an index in memory for fast
queries. The proxy is the only process that writes records (it holds the directory's lock), so the index is exact
while the proxy runs; looks at the directory find what runtimes and people change. Code that changes the directory
reads the directory first, not the index.
"""

import asyncio
import contextlib
import datetime
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace

from crust import errors, operations, volumes
from crust.handoff import claims
from crust.handoff import store as stores
from crust.handoff.entry import Entry
from crust.handoff.look import Looks
from crust.handoff.record import Record
from crust.host.block.device_sets import DeviceSet
from crust.host.process import workers
from crust.proxy.deferrals import reservations
from crust.proxy.deferrals.devices import Devices, set_of
from crust.proxy.deferrals.handoff_index import HandoffIndex, Known, keys_of
from crust.proxy.deferrals.raw_publishes import RawPublishes
from crust.proxy.deferrals.reservations import Reservation, ReservedByUnreadableEntry
from crust.proxy.deferrals.volume_secrets import VolumeSecrets

_LOOK_S = 10.0
"""For a look at one entry, which takes microseconds."""

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


class StatsAboveDevice(errors.RuntimeFailed):
    """A handler reported statistics that the volume's device cannot have."""

    def __init__(self, device: str, size_bytes: int, reported: int) -> None:
        super().__init__(
            f"the runtime reported impossible statistics of the filesystem on {device}",
            why=f"it reported a total of {reported}, and the device has {size_bytes} bytes",
            hint="read the handler's log; the guest may be broken or hostile",
        )


class DeferredVolumes:
    """The deferred volumes of this node. Constructed with an open store; call `look` first."""

    def __init__(
        self, store: stores.Store, devices: Devices, threads: operations.ThreadPool | None = None
    ) -> None:
        self.store = store
        self._devices = devices
        self._index = HandoffIndex()
        self._looks = Looks(store.layout)
        self._looking = asyncio.Lock()
        self._unreported: list[Entry] = []
        self._reserving = threading.Lock()
        """Held for every change of the index, which the event loop alone makes, and by threads that read it."""
        self._reserved: list[Reservation] = []
        self.operations = operations.KeyedOperations(threads or workers.Workers("the proxy"))
        """For all sockets, by volume and target: an operation that changes something of one holds its key."""
        self.unfinished: set[str] = set()
        """Targets where a failed publish may have left something: their unpublish is the proxy's, whatever is there.

        After a start these are all that carry a guard.
        """
        self.raw = RawPublishes(devices)
        self.secrets = VolumeSecrets(store, self.operations)

    async def look(self) -> tuple[Entry, ...]:
        """Scan the directory, and put what has changed into the index.

        Returns the entries that were read since the last call, in that order: a scan for `entries` may be the only
        one that sees a short claim.
        """
        await self._scan()
        unreported, self._unreported = self._unreported, []
        return tuple(unreported)

    async def _scan(self) -> None:
        async with self._looking:
            began = self._index.now()
            there, read = await workers.run(self._read_changes)
            with self._reserving:
                newer = self._index.apply(began, there, read)
            self._looks.forget(newer)
            self._unreported += [each.entry for each in read.values()]

    async def entries(self) -> tuple[Entry, ...]:
        """All entries after a look, by name; unreadable ones included. Without a thread they are those of the last
        look: an operator asks what hangs.
        """
        with contextlib.suppress(workers.NoWorkerFree):
            await workers.check_free()
            await self._scan()
        return self._index.entries()

    def find(self, target: str) -> Record | None:
        """The record for a target path, None if it is not deferred.

        Raises the error (`errors.Corrupt`) of an unreadable entry: an unknown volume is not an absent one, and the
        host must not mount it.
        """
        record = self._index.record_at(target)
        if record is None:
            error = self._index.error_at(target)
            if error is not None:
                raise error
        return record

    def has(self, target: volumes.TargetPath) -> bool:
        """Whether there is an entry for the target, as far as the index knows; an unreadable one included."""
        return self._index.get(target.digest) is not None

    def expect(self, target: str) -> Record:
        """The record for a target path; raises `NoDeferredVolume`."""
        record = self.find(target)
        if record is None:
            raise NoDeferredVolume(target)
        return record

    def all(self) -> tuple[Record, ...]:
        """Every readable record."""
        return self._index.records()

    def states(self) -> Mapping[tuple[str, str], int]:
        """How many entries of which driver are in which state. Any thread may ask."""
        return self._index.states()

    def reservations(self) -> int:
        """How many entries reserve a device. Any thread may ask."""
        return self._index.reserved()

    def of_volume(self, key: volumes.VolumeKey) -> tuple[Record, ...]:
        """The records of one volume."""
        held = (self._index.record_at(each.target.text) for each in self._index.sharing((key,)))
        return tuple(record for record in held if record is not None and record.key == key)

    def check_key(self, record: Record, key: volumes.VolumeKey) -> None:
        """Raise `TargetOfOtherVolume` unless the record is the volume's."""
        if record.key != key:
            raise TargetOfOtherVolume(record.target.text, key, record.key)

    def check_readable(self, key: volumes.VolumeKey) -> None:
        """Raise `reservations.ReservedByUnreadableEntry` if an entry that cannot be read has the volume, or may."""
        for each in self._index.sharing((key,)):
            if each.unreadable:
                why = f"has this volume, at {each.target}"
                raise ReservedByUnreadableEntry(key, each.unreadable, why)
        for directory in self._index.unknown():
            raise ReservedByUnreadableEntry(key, directory, "does not say whose it is")

    def check_unreserved(self, wanted: Reservation, *, deferred: bool = True) -> None:
        """Raise `reservations.DeviceReserved` if another target holds the device, and as `check_readable` does."""
        with self._reserving:
            self._check_unreserved(wanted, deferred=deferred)

    def _check_unreserved(self, wanted: Reservation, *, deferred: bool = True) -> None:
        there = self._index.record_at(wanted.target.text)
        if there is None or there.key != wanted.key:  # a retry of an existing publish may go on
            self.check_readable(wanted.key)
        held = self._index.sharing(keys_of(wanted))
        reservations.check(wanted, (*held, *self._reserved), deferred=deferred)

    @contextmanager
    def reserved(self, record: Record, devices: DeviceSet) -> Iterator[None]:
        """Reserve the record's device while its entry is created: another volume may name the same device.

        Any thread may do so. Raises `reservations.DeviceReserved` as `check_unreserved` does.
        """
        reservation = reservations.of(record, devices)
        with self._reserving:
            self._check_unreserved(reservation)
            self._reserved.append(reservation)
        try:
            yield
        finally:
            with self._reserving:
                self._reserved.remove(reservation)

    def publish(self, record: Record) -> Record:
        """Publish the entry to the runtime; returns the record that exists afterwards. Blocks.

        Publishing the same content again changes nothing. If only the device differs (attached again, grown), the
        record is replaced; while a sandbox has the volume, only the size may differ. The limits stay: only
        `change_limits` changes them, and a retry may bring older ones. Raises `EntryDiffers` if the target is
        published otherwise, `HeldBySandbox`.
        """
        entry = self.store.read(record.target)
        if entry is None:
            return self.store.create(record).require()
        there = entry.require()
        same_request = there.same_request(record)
        if same_request:
            limits = there.mount.io_limits
            record = replace(record, mount=replace(record.mount, io_limits=limits))
        if entry.live and same_request and _same_source(there, record):
            if there.same_content(record):
                return there
            return self.store.rewrite(there, record.mount).require()
        return self.store.publish(record, replace=same_request).require()

    async def change_limits(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> None:
        """Write new limits into a published volume's record. Raises `NoDeferredVolume`."""
        await self._change(target, lambda mount: replace(mount, io_limits=limits))

    async def change_capacity(self, target: volumes.TargetPath, size_bytes: int) -> None:
        """Write the new size into a published volume's record. Raises `NoDeferredVolume`."""
        await self._change(target, lambda mount: replace(mount, capacity_bytes=size_bytes))

    async def is_claimed(self, record: Record) -> bool:
        """Whether a sandbox has claimed the volume, or is claiming it. Raises as `holder`."""
        return await self.holder(record) is not None

    async def holder(self, record: Record) -> Holder | None:
        """The sandbox that has claimed the volume, or is claiming it. Equal results mean the same sandbox.

        Raises why claim.json of a held claim cannot be read: a newer runtime's is somebody's all the same.
        """
        return await self.operations.look(
            ("holder", record.target),
            lambda: self._holder(record.target),
            timeout_s=_LOOK_S,
            shown=f"the entry of {record.target}",
            fresh=True,
        )

    def _holder(self, target: volumes.TargetPath) -> Holder | None:
        entry = self.store.read(target)
        if entry is None:
            return None
        if entry.claim_error is not None and claims.is_held(self.store.layout.entry(target)):
            raise entry.claim_error
        if entry.claim is None or not entry.live:
            return None
        return entry.claim.sandbox_id, entry.claim.claimed_at

    async def check_fits(self, record: Record, stats: volumes.VolumeStats) -> None:
        """Raise `StatsAboveDevice` if a number of the statistics is greater than the device has bytes.

        The record may not have the size after an expansion yet, so then the kernel is asked. Of an image it has: the
        size is written before the guest learns of it.
        """
        greatest = max((each.total for each in stats.usage), default=0)
        if greatest <= record.mount.capacity_bytes:
            return
        size_bytes = record.mount.capacity_bytes
        if record.image is None:
            size_bytes = await workers.run(self._devices.size_bytes, record.device)
        if greatest > size_bytes:
            raise StatsAboveDevice(record.shown_source, size_bytes, greatest)

    def remember(self, record: Record, devices: DeviceSet) -> None:
        """Add a published record to the index."""
        directory = self.store.layout.entry(record.target).directory
        entry = Entry(record.digest, directory, record)
        self._written(record.digest, Known(entry, reservations.of(record, devices)))

    def forget(self, target: volumes.TargetPath) -> None:
        """Remove an unpublished record from the index, and its secrets."""
        self.secrets.drop(target)
        self._written(target.digest, None)

    def _written(self, digest: str, known: Known | None) -> None:
        with self._reserving:
            self._index.written(digest, known)

    async def _change(
        self,
        target: volumes.TargetPath,
        change: Callable[[volumes.DeferredMount], volumes.DeferredMount],
    ) -> None:
        record, devices = await workers.run(self._rewrite, target, change)
        known = self._index.record_at(target.text)
        # Meanwhile the volume may have been unpublished, or its record changed again.
        if known is not None and known.generation <= record.generation:
            self.remember(record, devices)

    def _rewrite(
        self,
        target: volumes.TargetPath,
        change: Callable[[volumes.DeferredMount], volumes.DeferredMount],
    ) -> tuple[Record, DeviceSet]:
        """Change the record that is on disk now, not one that was read before: it may have changed since."""
        entry = self.store.read(target)
        if entry is None:
            raise NoDeferredVolume(target.text)
        there = entry.require()
        mount = change(there.mount)
        if mount != there.mount:
            there = self.store.rewrite(there, mount).require()
        return there, set_of(self._devices, there.mount.source)

    def _read_changes(self) -> tuple[Set[str], Mapping[str, Known]]:
        look = self._looks.look()
        read = {digest: self._known(entry) for digest, entry in look.read.items()}
        return look.names, read

    def _known(self, entry: Entry) -> Known:
        if entry.record is None:
            return Known(entry, self._reserved_by(entry))
        devices = set_of(self._devices, entry.record.mount.source)
        return Known(entry, reservations.of(entry.record, devices))

    def _reserved_by(self, entry: Entry) -> Reservation | None:
        """The reservation of an entry that cannot be read."""
        held = entry.reserved
        if held is None:
            return None
        devices = self._devices.device_set(held.identity) if held.identity else None
        if held.image:
            devices = DeviceSet.alone(held.image)
        return Reservation(held.key, held.target, devices, held.readonly, entry.directory)


def _same_source(there: Record, record: Record) -> bool:
    """Whether a sandbox that has the one has the other. Monitors and user of an image may have changed since."""
    if there.image is not None and record.image is not None:
        return there.image.identity == record.image.identity
    return there.image is record.image and there.identity == record.identity
