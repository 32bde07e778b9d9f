"""What all parts of the proxy have in common: the entries of the handoff directory with their rows, and the events.

Code that changes the directory reads the directory first, not the table. Functions without `async` block.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from crust.core import credentials, errors, volumes
from crust.core.operations import KeyedOperations
from crust.core.supervised import Health
from crust.handoff import claims
from crust.handoff.claims import Claim
from crust.handoff.entry import Entry
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host.block.device_sets import DeviceSet
from crust.host.process import workers
from crust.proxy.filesystems import Filesystems
from crust.proxy.guard import Devices, Targets, devices_at, set_of
from crust.proxy.table import Table
from crust.proxy.target import Seen, Stack, Target

_LOOK_S = 10.0
"""For a look at one entry, which takes microseconds."""

QUEUE_LENGTH = 256
"""Events that wait for a watcher."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event. `kind` is a value of crust.v1.Event.kind; `time_s` is Unix time."""

    kind: str
    target_path: str = ""
    handler: str = ""
    message: str = ""
    time_s: float = field(default_factory=time.time)


class Events:
    """Distributes events to watchers, and never waits for one.

    Each watcher has a bounded queue. If the queue is full, events for that watcher are dropped and counted, and the
    watcher gets the count. A message may be another program's text: what looks like a credential in it is hidden from
    watchers. Nothing depends on events: the handoff directory is the truth.
    """

    def __init__(self) -> None:
        self._watchers: dict[asyncio.Queue[Event | None], int] = {}
        self._ended = False

    def emit(self, event: Event) -> None:
        """Put `event` into the queue of every watcher, unless the queue is full."""
        for queue in self._watchers:
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._watchers[queue] += 1

    def end(self) -> None:
        """End every watch, and those that begin from now on."""
        self._ended = True
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[Event]]:
        """The events while the block runs."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue(QUEUE_LENGTH)
        self._watchers[queue] = 0
        try:
            yield self._events(queue)
        finally:
            del self._watchers[queue]

    async def _events(self, queue: asyncio.Queue[Event | None]) -> AsyncIterator[Event]:
        while not self._ended and (event := await queue.get()) is not None:
            yield replace(event, message=credentials.shown(event.message))
            if queue.empty() and self._watchers[queue]:
                missed, self._watchers[queue] = self._watchers[queue], 0
                yield Event(
                    "missed", message=f"{missed} events were dropped: the reader is too slow"
                )


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of this node with the rows that belong to them, the host that they are about, the operations that
    change them, and those who are told.
    """

    store: Store
    table: Table
    targets: Targets
    filesystems: Filesystems
    devices: Devices
    operations: KeyedOperations
    """By volume and by target: an operation that changes something holds the keys of both."""
    events: Events
    health: Health

    def observe(self, key: volumes.VolumeKey, target: volumes.TargetPath) -> Seen:
        """What stands at a target: its entry with the claim, and its mounts. Raises nothing but what ends a process.

        While a program runs on the volume nobody knows what is there.
        """
        try:
            self.filesystems.locks.check_free(str(key))
            entry, mounts = self.store.read(target), self.targets.look(target)
        except Exception as error:  # also MemoryError: what cannot be seen is not absent
            return Seen(stack=Stack.UNSEEN, problem=error)
        return Seen(entry, mounts.stack, mounts.mount)

    def row_of(self, entry: Entry) -> Target:
        """The row of an entry as it was read, without what only the proxy remembers."""
        held = entry.reserved if entry.record is None else entry.record.reserved
        if held is None:
            return Target(entry.digest, entry=entry)
        return Target(
            entry.digest,
            held.target.text,
            entry,
            key=held.key,
            devices=set_of(self.devices, held.device) if held.device else None,
            readonly=held.readonly,
            handler=entry.record.handler if entry.record else None,
        )

    def check_not_raw(self, row: Target, record: Record, devices: DeviceSet) -> None:
        """Raise DevicePublishedRaw if the raw publish has the record's device, and one of the two can write."""
        at_target = devices_at(self.devices, row.path)
        if at_target is None or not at_target.shares_bytes_with(devices):
            return
        if record.readonly and (row.readonly or _is_readonly(row.path)):
            return
        raise errors.NotReady.named(
            "DevicePublishedRaw",
            f"the device {record.device} cannot be published to a runtime",
            why=f"it is published as a raw block volume at {row.path}",
            hint="stop the pod that uses it there; two writers to one device destroy its content",
        )

    async def change(self, target: volumes.TargetPath, **fields: Any) -> None:
        """Change fields of the mount in a published volume's record. Raises `claims.NotPublished`."""
        changed = await workers.run(self._rewrite, target, fields)
        row = self.table.at(target.text)
        # Meanwhile the volume may have been unpublished, or its record changed again.
        if row is None or row.record is None or changed.record is None:
            return
        if row.record.crust.generation <= changed.record.crust.generation:
            self.table.put(replace(row, entry=changed.entry, devices=changed.devices))

    async def holder(self, record: Record) -> Claim | None:
        """The claim of the sandbox that has the volume; without a name while the sandbox has not written claim.json.

        Raises why claim.json of a held claim cannot be read: a newer runtime's is somebody's all the same. One thread
        for each entry that hangs, however often it is asked for.
        """
        return await self.operations.look(
            ("holder", record.target),
            lambda: self._holder(record.target),
            timeout_s=_LOOK_S,
            shown=f"the entry of {record.target}",
            fresh=True,
        )

    async def secrets_of(self, record: Record, handler: str) -> Mapping[str, str]:
        """The secrets that the guest needs; none for a volume that needs none. They are in memory and nowhere else.

        A handler gets those of a volume that a live sandbox of its own has claimed: the lock is held, and claim.json
        names the handler. Raises SecretsNotForCaller, SecretsForgotten, and what reading the entry raises.
        """
        claim = await self.holder(record)
        # A held lock alone may be the proxy's own, which is unpublishing: then no sandbox is named.
        is_named = claim is not None and bool(claim.sandbox_id)
        if claim is None or not is_named or not claim.handler == record.handler == handler:
            raise errors.NotReady.named(
                "SecretsNotForCaller",
                f"runtime handler {handler[:63]!r} does not get the secrets of the volume at {record.target}",
                why="no live sandbox of that handler has claimed the volume",
                hint="claim the volume first, and ask while the claim is held",
            )
        if not record.mount.needs_secrets:
            return {}
        row = self.table.at(record.target.text)
        if row is None or row.key != record.key or row.secrets is None:
            raise errors.NotReady.named(
                "SecretsForgotten",
                f"the secrets of the volume at {record.target} are not known any more",
                why="the proxy was started after the volume was published, and keeps secrets in memory only",
                hint="delete the pod and create it again; with requiresRepublish in the CSIDriver object and a "
                "node-publish secret the kubelet publishes again by itself",
            )
        return row.secrets

    def _holder(self, target: volumes.TargetPath) -> Claim | None:
        entry = self.store.read(target)
        if entry is None:
            return None
        if entry.claim_error is not None and claims.is_held(self.store.layout.entry(target)):
            raise entry.claim_error
        return entry.claim if entry.live else None

    def _rewrite(self, target: volumes.TargetPath, fields: Mapping[str, Any]) -> Target:
        """Change the record that is on disk now, not one that was read before: it may have changed since."""
        entry = self.store.read(target)
        if entry is None:
            raise claims.NotPublished(target)
        there = entry.require()
        mount = replace(there.mount, **fields)
        if mount != there.mount:
            entry = self.store.rewrite(entry, mount)
        return self.row_of(entry)


def _is_readonly(path: str) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False
