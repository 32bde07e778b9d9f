"""A deferred NodePublishVolume, from the request to an entry in the handoff directory.

Everything that can refuse is asked before anything is touched: the target path, the handler, what the handler can do,
who has the volume. Then the shim, whose answer says which device it is; then the same questions again with what
is known now; then the sealed target; then the entry, which appears whole. What was made is undone, newest
first, when a later step fails; what a kill leaves is found by the retry or by the unpublish that a CO owes.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import Self

import grpc.aio

from crust import errors, metrics, volumes
from crust.handoff.record import Record
from crust.proxy import handler_admission, reservations
from crust.proxy import targets as targets_module
from crust.proxy.backend import Backend, Caller
from crust.proxy.deferred import DeferredVolumes
from crust.proxy.events import Event, Events
from crust.proxy.handlers import Handler, Handlers
from crust.proxy.policy import CannotDeferRawBlock, Decision
from crust.rpc import csi
from crust.wire.csi.v1 import csi_pb2

_log = logging.getLogger(__name__)


class DriverIgnoredDeferral(errors.RuntimeFailed):
    """The backend answered a deferred publish without metadata."""

    def __init__(self, key: volumes.VolumeKey) -> None:
        super().__init__(
            f"volume {key} was not deferred",
            why="the backend answered without deferred_mount; it was told to unpublish",
            hint="put a crust shim between the proxy and the driver",
        )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A request, decoded and checked."""

    key: volumes.VolumeKey
    target: volumes.TargetPath
    access: volumes.MountAccess
    readonly: bool

    @classmethod
    def of(cls, key: volumes.VolumeKey, request: csi_pb2.NodePublishVolumeRequest) -> Self:
        """Decode; raises `errors.InvalidRequest`."""
        target = volumes.TargetPath.parse(request.target_path)
        capability = csi.capability(request.volume_capability)
        if not isinstance(capability.access, volumes.MountAccess):
            raise CannotDeferRawBlock()
        return cls(key, target, capability.access, request.readonly or capability.mode.reader_only)


class DeferredPublish:
    """Carries deferred publishes out."""

    def __init__(
        self,
        deferred: DeferredVolumes,
        handlers: Handlers,
        events: Events,
        targets: targets_module.Targets,
    ) -> None:
        self._deferred = deferred
        self._handlers = handlers
        self._events = events
        self._targets = targets

    async def run(
        self,
        backend: Backend,
        key: volumes.VolumeKey,
        request: csi_pb2.NodePublishVolumeRequest,
        decision: Decision,
        caller: Caller,
    ) -> csi_pb2.NodePublishVolumeResponse:
        """Publish; raises what refuses, and `grpc.aio.AioRpcError` with the driver's own status."""
        try:
            wanted = _Wanted.of(key, request)
            return await self._publish(backend, wanted, request, decision, caller)
        except errors.CrustError as error:
            self._events.emit(
                Event("refused", request.target_path, decision.handler or "", error.shown())
            )
            raise

    async def _publish(
        self,
        backend: Backend,
        wanted: _Wanted,
        request: csi_pb2.NodePublishVolumeRequest,
        decision: Decision,
        caller: Caller,
    ) -> csi_pb2.NodePublishVolumeResponse:
        known = self._deferred.find(wanted.target.text)
        handler = await self._admit(wanted, known, decision)
        _flag(request)
        response = await backend.publish(request, caller)
        try:
            record = self._record(wanted, handler, response)
            with self._deferred.reserved(record):
                record = await asyncio.to_thread(self._place, record, is_new=known is None)
                self._deferred.remember(record)
        except BaseException:
            if known is None:  # a retry of a publish that stands must not take it down
                await self._unpublish(backend, wanted, caller)
            raise
        if known is None:
            # when the answer is on its way: who asked need not wait for what is told to others
            asyncio.get_running_loop().call_soon(_tell, self._events, record, decision)
        return csi_pb2.NodePublishVolumeResponse()

    async def _admit(self, wanted: _Wanted, known: Record | None, decision: Decision) -> Handler:
        """All that can be refused before the driver is asked."""
        self._targets.check_allowed(wanted.target)
        if known is not None:
            self._deferred.check_key(known, wanted.key)
        # what was decided stays decided: a second handler that came since makes a retry no less clear
        name = decision.handler or (known.handler if known is not None else None)
        handler = await self._handlers.choose(name)
        access = wanted.access
        handler_admission.check(
            handler, fs_type=access.fs_type, group=access.group, readonly=wanted.readonly
        )
        self._deferred.check_unreserved(
            reservations.Reservation(wanted.key, wanted.target, None, wanted.readonly)
        )
        if not self._targets.is_known_usable(
            wanted.target
        ):  # a thread costs more than all the looking
            await asyncio.to_thread(self._targets.check_usable, wanted.target)
        return handler

    def _record(
        self, wanted: _Wanted, handler: Handler, response: csi_pb2.NodePublishVolumeResponse
    ) -> Record:
        """The entry, checked with what the driver told."""
        if not response.HasField("deferred_mount"):
            raise DriverIgnoredDeferral(wanted.key)
        told = csi.deferred_mount(response.deferred_mount)
        mount = replace(told, readonly=told.readonly or wanted.readonly)
        handler_admission.check_answer(wanted.access, mount)
        handler_admission.check(
            handler, fs_type=mount.fs_type, group=mount.group, readonly=mount.readonly
        )
        handler_admission.check_limits(handler, mount.io_limits)
        return Record.of(mount, wanted.key, wanted.target, handler.name)

    def _place(self, record: Record, *, is_new: bool) -> Record:
        """Seal the target and make the entry appear, or leave neither. Blocks."""
        self._targets.check_unmounted(record.mount.source, readonly=record.readonly)
        self._targets.mount_guard(record.target)
        try:
            return self._deferred.publish(record)
        except BaseException:  # a bug must not leave a seal behind either
            if is_new:
                self._unmount_guard(record.target)
            raise

    async def _unpublish(self, backend: Backend, wanted: _Wanted, caller: Caller) -> None:
        request = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=wanted.key.volume_id, target_path=wanted.target.text, defer_fs_ops=True
        )
        # the reason of the publish's failure is the one to report; the CO's own unpublish does this again
        with contextlib.suppress(grpc.aio.AioRpcError):
            await backend.unpublish(request, caller)

    def _unmount_guard(self, target: volumes.TargetPath) -> None:
        try:
            self._targets.unmount_guard(target)
        except errors.CrustError as error:
            _log.warning("seal left behind", extra={"target": target.text, "error": error})


def _tell(events: Events, record: Record, decision: Decision) -> None:
    metrics.deferred_publishes.labels(record.key.driver, record.handler).inc()
    _log.info(
        "deferred",
        extra={
            "volume": str(record.key),
            "target": record.target.text,
            "handler": record.handler,
            "device": record.device,
            "decider": decision.decider,
        },
    )
    events.emit(Event("published", record.target.text, record.handler))


def _flag(request: csi_pb2.NodePublishVolumeRequest) -> None:
    """Make it the request for the shim: the flag, and the group in the deferral's own field as well (KEP-2857)."""
    request.defer_fs_ops = True
    mount = request.volume_capability.mount
    if mount.volume_mount_group and not mount.volume_supplemental_group:
        mount.volume_supplemental_group = mount.volume_mount_group
