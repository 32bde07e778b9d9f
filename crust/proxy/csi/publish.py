"""A deferred NodePublishVolume, from the request to an entry in the handoff directory.

All checks come before any change: the target path, the handler, its features, other users of the volume. Then the
proxy mounts the guard on the target and calls the shim, whose answer identifies the device, and repeats the checks
with the answer. Then it publishes the entry, which appears atomically.

The guard is mounted before the driver is called and unmounted after it: whatever a driver may have done for a target,
a guard or an entry shows it, after a kill too. If a step fails, what this attempt made is removed, and the error's
code depends on what remains (crust/rpc/outcome.py). An inline volume stays as it is: its unpublish deletes it, and it
may have been the pod's before a reboot. The retry of a publish that succeeded before needs no handler and removes
nothing.
"""

import asyncio
import contextlib
import logging
from contextlib import ExitStack
from dataclasses import dataclass, field

import grpc.aio

from crust import errors, metrics, operations, volumes
from crust.handoff.record import Record
from crust.handoff.store import EntryDiffers
from crust.host.block.device_sets import DeviceSet
from crust.host.process import workers
from crust.proxy.csi.backend import Backend, Caller
from crust.proxy.csi.policy import Decision
from crust.proxy.csi.publish_request import Wanted, mount_of, set_flag
from crust.proxy.csi.unpublish import DeferredUnpublish
from crust.proxy.deferrals import devices, reservations
from crust.proxy.deferrals import targets as targets_module
from crust.proxy.deferrals.deferred import DeferredVolumes
from crust.proxy.deferrals.events import Event, Events
from crust.proxy.runtimes import handler_admission
from crust.proxy.runtimes.handlers import Handler, Handlers
from crust.rpc import outcome
from crust.rpc.outcome import Residue
from crust.wire.csi.v1 import csi_pb2

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Attempt:
    """One run of a publish. `residue`: what would exist if it failed now."""

    residue: Residue = Residue.NONE
    known: Record | None = None
    held: ExitStack = field(default_factory=ExitStack)
    """A place in the sandbox and the device, until the volume is in the index or what was made is removed."""

    @property
    def is_new(self) -> bool:
        """Whether there is no entry yet. A retry that fails must not remove an entry that existed before."""
        return self.known is None


class DeferredPublish:
    """Carries out deferred publishes."""

    def __init__(
        self,
        deferred: DeferredVolumes,
        handlers: Handlers,
        events: Events,
        targets: targets_module.Targets,
        unpublish: DeferredUnpublish,
        on_node: devices.Devices,
    ) -> None:
        self._devices = on_node
        self._deferred = deferred
        self._handlers = handlers
        self._events = events
        self._targets = targets
        self._unpublish = unpublish
        self._sandboxes = handler_admission.SandboxVolumes()
        self._preparing: asyncio.Task[None] | None = None

    async def run(
        self,
        backend: Backend,
        key: volumes.VolumeKey,
        request: csi_pb2.NodePublishVolumeRequest,
        decision: Decision,
        caller: Caller,
    ) -> csi_pb2.NodePublishVolumeResponse:
        """Publish; raises a check's error or the driver's status, in a branch that its residue allows."""
        attempt = _Attempt()
        try:
            wanted = Wanted.of(key, request)
            with attempt.held:
                return await self._publish(backend, wanted, request, decision, caller, attempt)
        except (errors.CrustError, grpc.aio.AioRpcError) as error:
            if isinstance(error, EntryDiffers):
                attempt.residue = Residue.OTHER
            if isinstance(error, errors.CrustError):
                text = error.shown()
                self._events.emit(
                    Event("refused", request.target_path, decision.handler or "", text)
                )
            raise outcome.answer("NodePublishVolume", error, attempt.residue) from error

    async def _publish(
        self,
        backend: Backend,
        wanted: Wanted,
        request: csi_pb2.NodePublishVolumeRequest,
        decision: Decision,
        caller: Caller,
        attempt: _Attempt,
    ) -> csi_pb2.NodePublishVolumeResponse:
        self._targets.check_allowed(wanted.target)
        await self._look(backend, wanted, caller, attempt)
        handler = await self._admit(wanted, decision, attempt) if attempt.is_new else None
        if (
            attempt.residue is Residue.NONE
        ):  # else what exists is undone if the driver does not defer any more
            await backend.facts.check_defers()
        await backend.facts.check_name(wanted.key.driver)
        set_flag(request)
        if attempt.is_new:
            await self._mount_guard(wanted.target, attempt)
        try:
            response = await backend.publish(request, caller)
            mount = mount_of(wanted, request, response)
            record = self._record(wanted, attempt, decision, handler, mount)
            with self._deferred.secrets.kept(record, mount.secrets):
                record, shared = await workers.run(self._place, record, attempt)
                self._deferred.remember(record, shared)
            self._deferred.unfinished.discard(wanted.target.text)
        except BaseException as error:
            if attempt.is_new:
                attempt.residue = await self._undo(backend, wanted, caller, attempt, error)
            raise
        if attempt.is_new:
            operations.after_answer(lambda: self._answered(record, decision))
        return csi_pb2.NodePublishVolumeResponse()

    def _answered(self, record: Record, decision: Decision) -> None:
        _report(self._events, record, decision)
        self._preparing = asyncio.create_task(self._prepare(), name="the next guard")

    async def _prepare(self) -> None:
        with contextlib.suppress(errors.CrustError):  # the next publish makes its guard itself
            await workers.run(self._targets.prepare_guard)

    async def _look(
        self, backend: Backend, wanted: Wanted, caller: Caller, attempt: _Attempt
    ) -> None:
        """Find out what exists at the target: an entry, or the guard mount of an interrupted attempt."""
        attempt.residue = Residue.EXISTS  # an entry that cannot be read raises here
        attempt.known = self._deferred.find(wanted.target.text)
        if attempt.known is not None:
            if attempt.known.key != wanted.key:
                attempt.residue = Residue.NONE  # of the volume that is asked for
            elif not wanted.is_request_of(attempt.known):
                attempt.residue = Residue.OTHER
            self._deferred.check_key(attempt.known, wanted.key)
            return
        attempt.residue = Residue.NONE
        if self._targets.is_known_usable(wanted.target):
            return  # a thread hop costs more than the whole check
        try:
            await self._look_at_guard(wanted, attempt)
        except targets_module.TargetMounted:
            attempt.residue = Residue.EXISTS
            if wanted.target.text in self._deferred.unfinished:
                # a driver mounted although it was called with the flag, and its mount could not be undone at once
                attempt.residue = await self._take_back(backend, wanted, caller)
            if attempt.residue is not Residue.NONE:
                raise

    def _look_at_target(self, target: volumes.TargetPath) -> Residue:
        self._targets.check_usable(target)
        return Residue.EXISTS if self._targets.has_guard(target) else Residue.NONE

    async def _look_at_guard(self, wanted: Wanted, attempt: _Attempt) -> None:
        attempt.residue = await workers.run(self._look_at_target, wanted.target)
        if attempt.residue is Residue.NONE:
            return
        # an entry that the index does not have: usually there is none, or no look yet
        entry = await workers.run(self._deferred.store.read, wanted.target)
        if entry is not None:
            attempt.known = entry.require()
            self._deferred.check_key(attempt.known, wanted.key)

    async def _admit(self, wanted: Wanted, decision: Decision, attempt: _Attempt) -> Handler:
        """All checks before any change. An existing entry has passed them: its retry needs no handler."""
        handler = await self._handlers.choose(decision.handler)
        access = wanted.access
        handler_admission.check(
            handler, fs_type=access.fs_type, group=access.group, readonly=wanted.readonly
        )
        self._deferred.check_unreserved(
            reservations.Reservation(wanted.key, wanted.target, None, wanted.readonly)
        )
        there = self._sandboxes.place(handler, wanted.target, self._deferred.all())
        attempt.held.enter_context(there)
        return handler

    async def _mount_guard(self, target: volumes.TargetPath, attempt: _Attempt) -> None:
        """Mount it before the driver is called: if this attempt is killed, the guard shows that it was made.

        A failure leaves an empty directory at most, which a CO removes itself.
        """
        await workers.run(self._targets.mount_guard, target)
        if attempt.residue is Residue.NONE:
            attempt.residue = Residue.UNKNOWN

    def _record(
        self,
        wanted: Wanted,
        attempt: _Attempt,
        decision: Decision,
        handler: Handler | None,
        mount: volumes.DeferredMount,
    ) -> Record:
        """The record, checked with the driver's answer."""
        handler_admission.check_answer(wanted.access, mount)
        if handler is not None:
            handler_admission.check(
                handler, fs_type=mount.fs_type, group=mount.group, readonly=mount.readonly
            )
            handler_admission.check_limits(handler, mount.io_limits)
            handler_admission.check_guest_work(handler, mount)
            return Record.of(
                mount, wanted.key, wanted.target, handler.name, decided_by=decision.decider
            )
        assert attempt.known is not None
        # a retry keeps the first choice: a second handler may have registered since
        name = decision.handler or attempt.known.handler
        known = attempt.known.decided_by
        return Record.of(mount, wanted.key, wanted.target, name, decided_by=known)

    def _place(self, record: Record, attempt: _Attempt) -> tuple[Record, DeviceSet]:
        """Reserve the device, which is known now, and publish the entry of the guarded target. Blocks.

        In one hop: each one takes as long as all of this.
        """
        shared = devices.verify(self._devices, record.mount.source)
        attempt.held.enter_context(self._deferred.reserved(record, shared))
        if record.image is None:
            self._check_host_unused(record, shared, attempt)
        if not attempt.is_new:
            self._targets.mount_guard(record.target)
        return self._deferred.publish(record), shared

    def _check_host_unused(self, record: Record, shared: DeviceSet, attempt: _Attempt) -> None:
        if attempt.is_new:
            self._deferred.raw.check(record.block, shared, readonly=record.readonly)
        # no probe if the entry existed before: its sandbox may be opening the device just now
        self._targets.check_unmounted(record.block, readonly=record.readonly, probe=attempt.is_new)

    async def _undo(
        self,
        backend: Backend,
        wanted: Wanted,
        caller: Caller,
        attempt: _Attempt,
        error: BaseException,
    ) -> Residue:
        """Remove what this attempt made; returns what remains. The publish's own error is the one to report."""
        if isinstance(error, grpc.aio.AioRpcError):
            if not outcome.is_final(error):
                # the driver may still work on it: the guard stays, and the CO retries
                self._deferred.unfinished.add(wanted.target.text)
                return Residue.UNKNOWN
            if attempt.residue is Residue.UNKNOWN and not self._deferred.has(wanted.target):
                # nothing existed before this attempt, and the driver left nothing
                return await workers.run(self._remove_guard, wanted.target)
        return await self._take_back(backend, wanted, caller)

    async def _take_back(self, backend: Backend, wanted: Wanted, caller: Caller) -> Residue:
        """Remove what the driver and the proxy have made; returns what remains."""
        if wanted.is_inline:
            self._deferred.unfinished.add(wanted.target.text)
            return Residue.UNKNOWN
        request = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=wanted.key.volume_id, target_path=wanted.target.text, defer_fs_ops=True
        )
        try:
            return await self._unpublish.undo(backend, wanted.key, wanted.target, request, caller)
        except (errors.CrustError, grpc.aio.AioRpcError) as failure:
            self._deferred.unfinished.add(wanted.target.text)
            extra = {"target": wanted.target.text, "error": failure}
            _log.warning("failed publish not undone completely", extra=extra)
            return Residue.UNKNOWN

    def _remove_guard(self, target: volumes.TargetPath) -> Residue:
        try:
            self._targets.unmount_guard(target)
        except errors.CrustError as error:
            self._deferred.unfinished.add(target.text)
            _log.warning("guard mount not removed", extra={"target": target.text, "error": error})
            return Residue.EXISTS
        return Residue.NONE


def _report(events: Events, record: Record, decision: Decision) -> None:
    metrics.deferred_publishes.labels(record.key.driver, record.handler).inc()
    _log.info(
        "deferred",
        extra={
            "volume": str(record.key),
            "target": record.target.text,
            "handler": record.handler,
            "device": record.shown_source,
            "decider": decision.decider,
        },
    )
    events.emit(Event("published", record.target.text, record.handler))
