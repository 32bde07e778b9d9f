"""NodePublishVolume, deferred: from the request to an entry in the handoff directory.

A deferred publish observes the target, decides (`crust.proxy.target`), and does the steps. If a step fails, it undoes
as decided and observes again: the residue gives the code (crust/rpc/status.py), independent of the error.
All checks come before any change: the handler, its features, other users of the volume. Then the proxy mounts the
guard and calls the driver, whose answer identifies the device, and repeats the checks with the answer. Then it
writes the entry, which appears atomically.
"""

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crust.core import errors, metrics, volumes
from crust.core.volumes import HandlerFeature
from crust.handoff.entry import Entry
from crust.handoff.record import Record, unsupported
from crust.handoff.store import EntryDiffers
from crust.host.block.device_sets import DeviceSet
from crust.host.block.openers import Openers
from crust.host.process import workers
from crust.proxy.guard import verify
from crust.proxy.handlers import Handlers, RegisteredHandler, check_features, check_place, mount_of
from crust.proxy.policy import Decision
from crust.proxy.table import Entries, Event, observed
from crust.proxy.target import (
    MountStack,
    PublishPlan,
    TargetRow,
    TargetState,
    Wanted,
    group_unknown,
    lost_its_group,
    must_be_grown,
    must_be_made,
    publish_plan,
    residue_of,
    row_after_failure,
    undo_plan,
)
from crust.proxy.unpublish import Unpublish
from crust.rpc import status
from crust.rpc.call import Metadata
from crust.rpc.csi_driver import CHANGE_TIMEOUT_S, CsiDriver
from crust.rpc.messages import extensions
from crust.rpc.serving.service import as_crust_error
from crust.rpc.status import DriverOutcome, PeerStatus, Residue, Undo
from crust.wire.csi.v1 import csi_pb2

_PUBLISH = "NodePublishVolume"
_RPC = csi_pb2.NodeServiceCapability.RPC
_NOT_LOOKED = TargetState(stack=MountStack.UNSEEN)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run:
    """One deferred publish, with the observation at its beginning and the state of the driver's call."""

    backend: CsiDriver
    metadata: Metadata
    wanted: Wanted
    decision: Decision
    row: TargetRow
    began: TargetState = _NOT_LOOKED
    outcome: DriverOutcome = DriverOutcome.NOT_CALLED
    opened: Openers | None = None
    """The processes that have devices open, by a look beside the driver's call; not made if there was an entry."""


@dataclass(frozen=True, slots=True)
class Publish:
    entries: Entries
    handlers: Handlers
    unpublish: Unpublish

    async def defer(
        self,
        backend: CsiDriver,
        key: volumes.VolumeKey,
        request: csi_pb2.NodePublishVolumeRequest,
        decision: Decision,
        metadata: Metadata,
    ) -> csi_pb2.NodePublishVolumeResponse:
        """Publish to a runtime; raises an error or the driver's status, with a code that fits the residue."""
        try:
            wanted = Wanted.of(key, request)
            self.entries.targets.check_allowed(wanted.target)
        except Exception as error:
            raise self.refuse(request.target_path, error, decision=decision) from error
        row = self.entries.table.at(wanted.target.text) or TargetRow.of(wanted.target.text, key=key)
        run = _Run(backend, metadata, wanted, decision, row)
        try:
            await self._defer(run, request)
        except Exception as error:
            # also a bug, or MemoryError: the residue decides, and not the error's class
            raise await self._failed(run, error) from error
        return csi_pb2.NodePublishVolumeResponse()

    def refuse(
        self,
        target: str,
        error: Exception,
        residue: Residue | None = None,
        decision: Decision | None = None,
    ) -> errors.CrustError:
        """The error that answers a publish; watchers get it if the publish was to be deferred.

        Without a residue the publish has not observed the target, and the table says whether there is one.
        """
        if residue is None:
            residue = Residue.NONE if self.entries.table.at(target) is None else Residue.EXISTS
        crust_error = as_crust_error(_PUBLISH, "the proxy", error)
        if decision is not None:
            event = Event("refused", target, decision.handler or "", crust_error.shown())
            self.entries.events.emit(event)
        return status.allowed_error(_PUBLISH, crust_error, residue)

    async def _defer(self, run: _Run, request: csi_pb2.NodePublishVolumeRequest) -> None:
        wanted, is_free = run.wanted, self.entries.table.at(run.wanted.target.text) is None
        if run.row.entry is not None:
            run.row.entry.require()
        handler = None  # an existing entry has passed the checks: its retry needs no handler
        if run.row.record is None:
            handler = await self._admit(run)
        else:
            self.entries.table.put(replace(run.row, busy=True))
        if is_free:  # else what stands is undone if the driver does not defer any more
            await run.backend.check_defers()
        await run.backend.check_name(wanted.key.driver)
        await self._begin(run, handler)
        if run.began.entry is None and handler is None:  # a person has moved the entry away
            handler = await self._admit(run)
            await self._begin(run, handler)
        mount = mount_of(wanted, request, await self._call_driver(run, request))
        record = self._record(run, handler, mount)
        if handler is not None and (mount.format is not None or wanted.grows_on_host):
            await self._prepare_filesystem(run, handler, mount, record)
        entry, devices = await workers.run(self._place, run, record, mount.secrets)
        self.entries.table.put(
            replace(
                run.row,
                entry=entry,
                stack=MountStack.GUARD,
                key=wanted.key,
                devices=devices,
                readonly=entry.require().readonly,
                handler=record.handler,
                secrets=mount.secrets or None,
                busy=False,
                unpublish_refused=False,
            )
        )
        self.entries.report_problem(run.row.name, "unpublish", None)
        if run.began.entry is None:
            metrics.deferred_publishes.labels(wanted.key.driver, record.handler).inc()
            extra = {
                "volume": str(wanted.key),
                "target": wanted.target.text,
                "handler": record.handler,
                "device": record.shown_source,
                "decider": run.decision.decider,
            }
            _log.info("deferred", extra=extra)
            self.entries.events.emit(Event("published", wanted.target.text, record.handler))

    async def _admit(self, run: _Run) -> RegisteredHandler:
        """All checks before any change; then, without a wait, reserve the volume and a place in the sandbox."""
        handler = await self.handlers.choose(run.decision.handler)
        access, readonly = run.wanted.access, run.wanted.readonly
        check_features(handler, access.fs_type, access.group, readonly=readonly)
        if run.decision.takes_sub_path and HandlerFeature.SUB_PATH not in handler.features:
            why = "a container of the pod mounts a subPath of it"
            raise unsupported(handler.name, why, HandlerFeature.SUB_PATH)
        check_place(handler, run.wanted.target, self.entries.table)
        if not (run.wanted.grows_on_host or HandlerFeature.GROW in handler.features):
            run.metadata = (*run.metadata, (extensions.KEY, extensions.NOBODY_GROWS))
        key = run.wanted.key
        row = replace(run.row, key=key, readonly=readonly, handler=handler.name, busy=True)
        self.entries.table.reserve(row)
        run.row = row
        return handler

    async def _begin(self, run: _Run, handler: RegisteredHandler | None) -> None:
        """Observe, decide, and mount the guard; undo first a driver's mount over an old guard."""
        run.began = await workers.run(self._look_and_guard, run, handler)
        plan = publish_plan(run.began, run.wanted)
        if plan is PublishPlan.CLEAN_FIRST:
            await self._take_back(run)
            run.began = await workers.run(self._look_and_guard, run, handler)
            plan = publish_plan(run.began, run.wanted)
        if plan in (PublishPlan.REFUSE, PublishPlan.CLEAN_FIRST):
            raise _refused(run.began, run.wanted)

    def _look_and_guard(self, run: _Run, handler: RegisteredHandler | None) -> TargetState:
        """Observe and mount the guard. Blocks. In one thread hop, which takes as long as both."""
        seen = self.entries.observe(run.wanted.key, run.wanted.target)
        plan = publish_plan(seen, run.wanted)
        if plan is PublishPlan.DEFER and handler is not None:
            names = HandlerFeature.SUB_PATH in handler.features
            self.entries.targets.mount_guard(run.wanted.target, names=names)
        if plan is PublishPlan.RENEW:
            row = replace(run.row, entry=seen.entry)
            is_lost = seen.stack is MountStack.CLEAR and lost_its_group(row)
            if is_lost or "group" in run.row.problems:
                raise group_unknown(run.wanted.target.text)
            if seen.stack is MountStack.CLEAR:
                self.entries.targets.restore_guard(run.wanted.target, run.row.guard)
        return seen

    async def _call_driver(
        self, run: _Run, request: csi_pb2.NodePublishVolumeRequest
    ) -> csi_pb2.NodePublishVolumeResponse:
        """Call the driver, with the group and its policy if it has the capabilities for them (D-6); meanwhile a
        thread looks for processes that have devices open.

        If the entry existed, no thread looks: its sandbox may have the device, and the driver mostly answers the same
        device again.
        """
        request.defer_fs_ops = True
        await run.backend.check_defers()
        advertised, mount = await run.backend.node_capabilities(), request.volume_capability.mount
        # KEP-2857: it is the group of a delegated publish too
        mount.volume_supplemental_group = (
            mount.volume_supplemental_group or mount.volume_mount_group
        )
        if _RPC.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP not in advertised:
            mount.ClearField("volume_supplemental_group")
            mount.ClearField("volume_supplemental_group_change_policy")
        elif _RPC.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY not in advertised:
            mount.ClearField("volume_supplemental_group_change_policy")
        run.outcome = DriverOutcome.SILENT
        publish = run.backend.node.NodePublishVolume
        calls: list[Awaitable[Any]] = [
            publish(request, metadata=run.metadata, timeout=CHANGE_TIMEOUT_S)
        ]
        if run.began.entry is None:
            calls.append(workers.run(self.entries.targets.openers))
        answer, *results = await asyncio.gather(*calls, return_exceptions=True)
        if isinstance(answer, PeerStatus) and status.is_final(answer):
            run.outcome = DriverOutcome.REFUSED
        if isinstance(answer, BaseException):
            raise answer
        run.outcome = DriverOutcome.ANSWERED
        for opened in results:
            if isinstance(opened, BaseException):
                raise opened
            run.opened = opened
        response: csi_pb2.NodePublishVolumeResponse = answer
        return response

    def _record(
        self, run: _Run, handler: RegisteredHandler | None, mount: volumes.DeferredMount
    ) -> Record:
        """The record, checked with the driver's answer. A retry keeps the first choice of a handler."""
        if run.began.entry is not None:
            record = run.began.entry.require()
            if record.mount.format is None:  # the proxy has made the filesystem, if it was missing
                mount = replace(mount, format=None)
            return record.replaced(mount)
        assert handler is not None
        check_features(handler, mount.fs_type, mount.group, readonly=mount.readonly, mount=mount)
        if HandlerFeature.FORMAT not in handler.features:
            mount = replace(mount, format=None)
        return Record.of(
            mount,
            run.wanted.key,
            run.wanted.target,
            handler.name,
            request=run.wanted.digest,
            decided_by=run.decision.decider,
            pod=run.wanted.pod,
        )

    async def _prepare_filesystem(
        self, run: _Run, handler: RegisteredHandler, mount: volumes.DeferredMount, record: Record
    ) -> None:
        """Make or grow the filesystem where the handler's guests do not, on the reserved device."""
        makes = must_be_made(run.began, mount, handler.features)
        grows = must_be_grown(run.began, run.wanted, mount, handler.features)
        if not (makes or grows):
            return
        await workers.run(self._reserve_device, run, record, mount.secrets)
        if makes and mount.format is not None:
            await self.entries.filesystems.make_if_blank(
                record.key, record.block, record.mount, mount.format, handler.guest_kernel
            )
        if grows:
            await self.entries.filesystems.grow(record)
        run.opened = None  # a program may have taken long

    def _place(
        self, run: _Run, record: Record, secrets: Mapping[str, str]
    ) -> tuple[Entry, DeviceSet]:
        """Reserve the device, which is known now, and write the entry of the guarded target. Blocks."""
        devices = self._reserve_device(run, record, secrets)
        if run.began.entry is None and not isinstance(record.mount.source, volumes.NetworkImage):
            self.entries.filesystems.check_log(record)
        return self.entries.store.write(record), devices

    def _reserve_device(self, run: _Run, record: Record, secrets: Mapping[str, str]) -> DeviceSet:
        """Reserve the device and check that nothing uses it. Blocks.

        The secrets are in the table before the entry is there: a handler may claim at once.
        """
        devices = verify(self.entries.devices, record.mount.source)
        present = run.began.entry.record if run.began.entry is not None else None
        # a driver may answer otherwise than before, and the record of before stands until it is replaced
        readonly = record.readonly and (present is None or present.readonly)
        reserved = replace(run.row, key=record.key, devices=devices, readonly=readonly)
        self.entries.table.reserve(replace(reserved, secrets=secrets or None, busy=True))
        if isinstance(record.mount.source, volumes.NetworkImage):
            return devices
        if present is not None and present.same_source(record):
            self.entries.targets.check_mounts(record.block, readonly=readonly)
            return devices
        # the sandbox of the entry may have that device
        if present is not None and present.image is None:
            self.entries.targets.check_given_back(present.block)
        self.entries.targets.check_unused(record.block, readonly=readonly, opened=run.opened)
        return devices

    async def _failed(self, run: _Run, error: Exception) -> errors.CrustError:
        """Undo as decided, observe, and return the publish's own error with the code for the residue."""
        todo = undo_plan(run.began, run.outcome, is_inline=run.wanted.is_inline)
        try:
            if todo is Undo.REMOVE:
                await workers.run(self.entries.targets.unmount_guard, run.wanted.target)
            elif todo is Undo.UNPUBLISH:
                await self._take_back(run)
        except Exception as failure:
            extra = {"target": run.wanted.target.text, "error": failure}
            _log.warning("failed publish not undone completely", extra=extra)
        reserved = self.entries.table.at_name(run.row.name)
        row = run.row if reserved is None or run.began.entry is not None else reserved
        try:
            seen, left = await workers.run(self._left, run, row)
        except Exception as failure:  # no thread is free
            seen = TargetState(stack=MountStack.UNSEEN, problem=failure)
            left = row_after_failure(row, seen)
        if left is None:
            self.entries.table.drop(run.row.name)
        else:
            self.entries.table.put(left)
        residue = residue_of(seen, run.wanted)
        return self.refuse(run.wanted.target.text, error, residue, run.decision)

    def _left(self, run: _Run, row: TargetRow) -> tuple[TargetState, TargetRow | None]:
        """The observation after a failed publish, and the target's row, by what its entry says. Blocks."""
        seen = self.entries.observe(run.wanted.key, run.wanted.target)
        left = row_after_failure(row, seen)
        if left is not None and seen.entry is not None:
            left = observed(left, self.entries.row_of(seen.entry))
        return seen, left

    async def _take_back(self, run: _Run) -> None:
        request = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=run.wanted.key.volume_id,
            target_path=run.wanted.target.text,
            defer_fs_ops=True,
        )
        await self.unpublish.remove(
            run.backend, run.wanted.key, run.wanted.target, request, run.metadata
        )


def _refused(seen: TargetState, wanted: Wanted) -> Exception:
    if seen.problem is not None:
        return seen.problem
    if seen.entry is None:
        return seen.mounted(wanted.target)
    record = seen.entry.record
    if record is None:
        return seen.entry.error or errors.Corrupt("the entry cannot be read")
    is_same = record.same_publish(wanted.key, wanted.digest)
    return seen.mounted(wanted.target) if is_same else EntryDiffers(record)
