"""Checks at each look whether a published entry still has what belongs to it: its guard mount and its device.

A guard is lost when somebody unmounts it, or when the mounts of a container end with it. The target is open then: a
runtime that misses the entry would write to the node's disk. So the guard is mounted again, as an operation at the
target. Where that fails, and where the device of an entry is gone or is another one, the proxy reports it as its
health: it cannot repair that, the CO has to publish the volume again.

The mounts are listed only when they have changed since the last check, and a device is checked when its entry is
read.
"""

import logging
from collections.abc import Iterable, Set

from crust import errors, operations, volumes
from crust.handoff.entry import Entry
from crust.handoff.record import Record
from crust.host.process import workers
from crust.proxy.deferrals.deferred import DeferredVolumes
from crust.proxy.deferrals.devices import Devices
from crust.proxy.deferrals.events import Event, Events
from crust.proxy.deferrals.targets import Targets
from crust.rpc.serving.health import Health

_RESTORE_S = 5.0
"""How long a look waits for a guard mount. One that hangs is reported, and goes on."""

_log = logging.getLogger(__name__)


class PublishedDeviceChanged(errors.NotReady):
    """The device of a published volume is gone, or another one has its path."""

    def __init__(self, record: Record, why: str) -> None:
        super().__init__(
            f"the volume at {record.target} cannot be used by a runtime any more",
            why=f"its device {record.device} was {record.identity}, and {why}",
            hint="delete the pod; the CO publishes the volume again for the next one",
        )


class RestoreHangs(errors.PeerUnavailable):
    """The guard mount of a published volume is lost, and mounting it again does not end."""

    def __init__(self, target: volumes.TargetPath) -> None:
        super().__init__(
            f"the guard mount of {target} is not restored",
            why=f"the system call has not returned within {_RESTORE_S:g} s",
            hint="check the filesystem below the target and the kernel log for calls that hang",
        )


class EntryChecks:
    """The checks, called after each look."""

    def __init__(
        self,
        deferred: DeferredVolumes,
        targets: Targets,
        devices: Devices,
        events: Events,
        health: Health,
    ) -> None:
        self._deferred = deferred
        self._targets = targets
        self._devices = devices
        self._events = events
        self._health = health
        self._checked: frozenset[volumes.TargetPath] = frozenset()
        self._failed: set[volumes.TargetPath] = set()
        self._reported: set[tuple[str, volumes.TargetPath]] = set()

    async def check(self, read: Iterable[Entry]) -> None:
        """Check every guard, if it may have changed, and the devices of the entries that were read just now."""
        records = [entry.record for entry in read if entry.record is not None]
        for target, problem in await workers.run(self._devices_of, records):
            self._report("device", target, problem)
        for target in await self._unguarded({record.target for record in records}):
            if not await self._restore(target):
                break  # the next check goes on with the others: a look does not wait for each that hangs
        if self._reported:
            self._forget_reports()

    def _devices_of(
        self, records: list[Record]
    ) -> list[tuple[volumes.TargetPath, errors.CrustError | None]]:
        return [(each.target, self._problem_of(each)) for each in records]

    def _problem_of(self, record: Record) -> errors.CrustError | None:
        if record.image is not None:  # only its cluster knows, and only with the key of its user
            return None
        try:
            found = self._devices.identify(record.device)
        except errors.CrustError as error:
            return PublishedDeviceChanged(record, error.what)
        if found != record.identity:
            return PublishedDeviceChanged(record, f"the kernel has {found} there")
        return None

    async def _unguarded(self, read: Set[volumes.TargetPath]) -> list[volumes.TargetPath]:
        """The targets without a guard. One that could not be restored comes last, and only when its entry is read."""
        wanted = frozenset(record.target for record in self._deferred.all())
        if not wanted <= self._checked | self._failed or self._targets.mounts_changed():
            guarded = set(await workers.run(self._targets.guards))
            self._checked = frozenset(each for each in wanted if each.text in guarded)
            for each in self._failed & self._checked:  # it hung, or somebody has helped
                self._has_its_guard(each)
        self._checked &= wanted
        self._failed &= wanted
        return sorted(
            wanted - self._checked - (self._failed - read),
            key=lambda each: (each in self._failed, each.text),
        )

    async def _restore(self, target: volumes.TargetPath) -> bool:
        """Mount the guard again, or report why not; returns False if that hangs."""
        try:
            restored = await self._deferred.operations.run(
                target,
                "restore of the guard mount",
                None,
                lambda: self._mount(target),
                limit_s=_RESTORE_S,
            )
        except (operations.OperationInProgress, operations.ShuttingDown, workers.NoWorkerFree):
            return True  # the operation that runs there mounts it, or the next check does
        except operations.OperationOverdue:
            self._failed.add(target)
            self._report("guard mount", target, RestoreHangs(target))
            return False
        except errors.CrustError as error:
            self._failed.add(target)
            self._report("guard mount", target, error)
            return True
        self._has_its_guard(target)
        self._checked |= {target}
        if restored:
            _log.warning("guard mount restored", extra={"target": target.text})
            self._events.emit(Event("guard-restored", target.text))
        return True

    def _has_its_guard(self, target: volumes.TargetPath) -> None:
        self._failed.discard(target)
        self._report("guard mount", target, None)

    async def _mount(self, target: volumes.TargetPath) -> bool:
        def mount() -> bool:
            entry = self._deferred.store.read(target)
            if entry is None or entry.record is None or self._targets.has_guard(target):
                return False
            self._targets.restore_guard(target)
            return True

        return await workers.run(mount)

    def _report(
        self, part: str, target: volumes.TargetPath, problem: errors.CrustError | None
    ) -> None:
        known = (part, target) in self._reported
        if problem is None and not known:
            return
        self._health.report(f"{part} of {target}", problem, is_fatal=False)
        if problem is None:
            self._reported.discard((part, target))
            self._events.emit(Event("healthy", target.text, message=part))
        elif not known:
            self._reported.add((part, target))
            self._events.emit(Event("unhealthy", target.text, message=str(problem)))

    def _forget_reports(self) -> None:
        """What is unpublished is no problem any more."""
        published = {record.target for record in self._deferred.all()}
        for part, target in tuple(self._reported):
            if target not in published:
                self._report(part, target, None)
