"""A deferred NodePublishVolume, from the request to an entry in the handoff directory.

All checks come before any change: the target path, the handler, its features, other users of the volume. Then the
proxy calls the shim, whose answer identifies the device, and repeats the checks with the answer. Then it mounts the
guard on the target, and publishes the entry, which appears atomically. If a step fails, the steps before it are
undone, newest first. If the proxy is killed, the CO's retry or unpublish completes the work.
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
    """The driver answered a deferred publish without deferred_mount."""

    def __init__(self, key: volumes.VolumeKey) -> None:
        super().__init__(
            f"volume {key} was not deferred",
            why="the driver answered without deferred_mount; the proxy called unpublish",
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
    """Carries out deferred publishes."""

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
        """Publish; raises the error of any check, and `grpc.aio.AioRpcError` with the driver's own status."""
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
        _set_flag(request)
        response = await backend.publish(request, caller)
        try:
            record = self._record(wanted, handler, response)
            with self._deferred.reserved(record):
                record = await asyncio.to_thread(
                    self._mount_guard_and_publish, record, is_new=known is None
                )
                self._deferred.remember(record)
        except BaseException:
            if known is None:  # a failed retry must not undo the existing publish
                await self._unpublish(backend, wanted, caller)
            raise
        if known is None:
            # after the answer is sent: the caller need not wait for log, metrics and events
            asyncio.get_running_loop().call_soon(_report, self._events, record, decision)
        return csi_pb2.NodePublishVolumeResponse()

    async def _admit(self, wanted: _Wanted, known: Record | None, decision: Decision) -> Handler:
        """All checks before the driver is called."""
        self._targets.check_allowed(wanted.target)
        if known is not None:
            self._deferred.check_key(known, wanted.key)
        # a retry keeps the first choice: a second handler may have registered since
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
        ):  # a thread hop costs more than the whole check
            await asyncio.to_thread(self._targets.check_usable, wanted.target)
        return handler

    def _record(
        self, wanted: _Wanted, handler: Handler, response: csi_pb2.NodePublishVolumeResponse
    ) -> Record:
        """The record, checked with the driver's answer."""
        if not response.HasField("deferred_mount"):
            raise DriverIgnoredDeferral(wanted.key)
        answer = csi.deferred_mount(response.deferred_mount)
        mount = replace(answer, readonly=answer.readonly or wanted.readonly)
        handler_admission.check_answer(wanted.access, mount)
        handler_admission.check(
            handler, fs_type=mount.fs_type, group=mount.group, readonly=mount.readonly
        )
        handler_admission.check_limits(handler, mount.io_limits)
        return Record.of(mount, wanted.key, wanted.target, handler.name)

    def _mount_guard_and_publish(self, record: Record, *, is_new: bool) -> Record:
        """Mount the guard and publish the entry, or leave neither. Blocks."""
        self._targets.check_unmounted(record.mount.source, readonly=record.readonly)
        self._targets.mount_guard(record.target)
        try:
            return self._deferred.publish(record)
        except BaseException:  # also after an unexpected exception
            if is_new:
                self._unmount_guard(record.target)
            raise

    async def _unpublish(self, backend: Backend, wanted: _Wanted, caller: Caller) -> None:
        request = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=wanted.key.volume_id, target_path=wanted.target.text, defer_fs_ops=True
        )
        # report the error of the publish, not of this call; the CO's own unpublish does this again
        with contextlib.suppress(grpc.aio.AioRpcError):
            await backend.unpublish(request, caller)

    def _unmount_guard(self, target: volumes.TargetPath) -> None:
        try:
            self._targets.unmount_guard(target)
        except errors.CrustError as error:
            _log.warning("guard mount not removed", extra={"target": target.text, "error": error})


def _report(events: Events, record: Record, decision: Decision) -> None:
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


def _set_flag(request: csi_pb2.NodePublishVolumeRequest) -> None:
    """Prepare the request for the shim: set the flag, and copy the group into the field for deferral (KEP-2857)."""
    request.defer_fs_ops = True
    mount = request.volume_capability.mount
    if mount.volume_mount_group and not mount.volume_supplemental_group:
        mount.volume_supplemental_group = mount.volume_mount_group
