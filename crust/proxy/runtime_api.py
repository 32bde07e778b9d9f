"""KEP-2857's service Runtime without staging, and its extensions; shims and our driver call it.

A caller names a volume by its target path, and each call has one shape: the record, the handler whose sandbox has the
volume, the feature that the handler must offer, the call. A sandbox whose handler is not registered, or that is just
claiming the volume, is an error: it does not mean that nobody has the volume. The numbers in a handler's answer come
from a guest, so they are checked. A call stores its result in the record alone.

- Expand: the size goes into the record even if no caller waits any more. A kubelet does not retry after
  FAILED_PRECONDITION until the pod is restarted, so only two errors have that code (crust/rpc/status.py):
  `OfflineExpansionOnly`, and `FilesystemNotGrown` for a handler without GROW: nobody would grow the filesystem later.
- Freeze: the guest keeps the time limit, because the caller, this process and the handler may all die.
- Limits: the handler gets them first, then the record is written; if either fails, both have the old ones. A sandbox
  that claims the volume while the record is written may have read the old one, so it gets the limits afterwards. The
  handler must be registered even without a sandbox: limits that it cannot enforce would be ignored in silence.
- Health: the proxy calls the driver first. If the driver finds nothing and the guest cannot answer, the call fails:
  it does not answer "healthy".
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from crust.core import errors, volumes
from crust.core.volumes import HandlerFeature
from crust.handoff import claims
from crust.handoff.record import Record, unsupported
from crust.host.filesystems import mkfs
from crust.host.process import workers
from crust.proxy import handler_calls
from crust.proxy.handlers import Handlers, RegisteredHandler
from crust.proxy.table import Entries, Event
from crust.proxy.target import TargetRow
from crust.rpc import status
from crust.rpc.call import Call, add_fields
from crust.rpc.messages import crust_v1, csi
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import runtime_pb2, types_pb2

REASON = "ReportedByRuntime"
"""The reason of a health status that a guest reports, for programs."""

_NOT_GROWN = "FilesystemNotGrown"
NOT_GROWN = (
    f"[{_NOT_GROWN}] the filesystem is smaller than its device, see: crust explain {_NOT_GROWN}"
)
"""In at most 128 bytes, as CSI has it for a string."""

_OLD_SIZE = volumes.VolumeCondition(abnormal=True, message=NOT_GROWN)
_SUPERBLOCK_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RuntimeApi:
    """The service Runtime. A method that it lacks is answered as not served."""

    entries: Entries
    handlers: Handlers

    async def RuntimeGetVolumeStats(
        self, request: runtime_pb2.RuntimeGetVolumeStatsRequest, call: Call
    ) -> runtime_pb2.RuntimeGetVolumeStatsResponse:
        """Statistics from the kernel that has the volume mounted."""
        record = self._expect(request.volume_target_path)
        handler = await self._in_sandbox(record)
        if handler is None:
            raise errors.NotReady.named(
                "NotMountedInSandbox",
                f"the volume at {record.target.text} is not mounted",
                why="it is published to a runtime, and no sandbox has it now",
            )
        if HandlerFeature.STATS not in handler.features:
            raise errors.NotReady.named(
                "HandlerCannotReport",
                f"there are no statistics of the volume at {record.target}",
                why=f"a sandbox has it, and runtime handler {handler.name!r} does not offer STATS",
            )
        stats = await handler_calls.stats(handler, record.target, call.time_remaining())
        greatest = max((usage.total for usage in stats.usage), default=0)
        size_bytes = record.mount.capacity_bytes
        # an image's record has its new size before the guest; a device's may not have it yet, but the kernel has
        if greatest > size_bytes and record.image is None:
            size_bytes = await workers.run(self.entries.devices.size_bytes, record.device)
        if greatest > size_bytes:
            raise crust_v1.ImplausibleStats(
                f"a total of {greatest} on {record.shown_source}, which has {size_bytes} bytes"
            )
        return runtime_pb2.RuntimeGetVolumeStatsResponse(
            usage=crust_v1.usages_to_wire(stats, types_pb2.VolumeUsage),
            volume_condition=crust_v1.condition_to_wire(
                await self._condition(handler, record, stats.condition, call.time_remaining())
            ),
        )

    async def RuntimeExpandVolume(
        self, request: runtime_pb2.RuntimeExpandVolumeRequest, call: Call
    ) -> runtime_pb2.RuntimeExpandVolumeResponse:
        """Grow the filesystem to its device. Without a sandbox only the record changes; the next mount grows it."""
        target = self._expect(request.volume_target_path).target
        capacity = csi.capacity_range(request.capacity_range)
        try:
            size_bytes = await self.entries.operations.run(
                target,
                "RuntimeExpandVolume",
                capacity,
                lambda: self._expand(target, capacity),
                left_s=call.time_remaining(),
            )
        except errors.CrustError as error:
            raise status.allowed_error("RuntimeExpandVolume", error, status.Residue.NONE) from error
        return runtime_pb2.RuntimeExpandVolumeResponse(capacity_bytes=size_bytes)

    async def RuntimeFreezeVolume(
        self, request: runtime_pb2.RuntimeFreezeVolumeRequest, call: Call
    ) -> runtime_pb2.RuntimeFreezeVolumeResponse:
        """Freeze the filesystem in the sandbox, for a limited time; false if no sandbox has the volume."""
        record = self._expect(request.volume_target_path)
        thaw_after_s = crust_v1.thaw_after_s(request.thaw_after_seconds)
        handler = await self._in_sandbox(record)
        if handler is None:
            return runtime_pb2.RuntimeFreezeVolumeResponse(frozen=False)
        if HandlerFeature.FREEZE not in handler.features:
            raise errors.NotReady.named(
                "HandlerCannotFreeze",
                f"the volume at {record.target} cannot be frozen",
                why=f"a sandbox has it, and runtime handler {handler.name!r} does not offer FREEZE",
            )
        left_s = call.time_remaining()
        try:
            await handler_calls.freeze(handler, record.target, thaw_after_s, left_s)
        except errors.CrustError:
            if await self.entries.holder(record) is not None:
                raise
        else:
            self._emit("frozen", record, f"for {thaw_after_s} s at most")
            return runtime_pb2.RuntimeFreezeVolumeResponse(frozen=True)
        # ended since; a release takes a moment
        return runtime_pb2.RuntimeFreezeVolumeResponse(frozen=False)

    async def RuntimeCheckDeviceUnused(
        self, request: runtime_pb2.RuntimeCheckDeviceUnusedRequest, call: Call
    ) -> runtime_pb2.RuntimeCheckDeviceUnusedResponse:
        """Whether a driver may have its device back, asked where the host's processes can be seen."""
        number = os.makedev(request.major, request.minor)
        await workers.run(self._check_unused, number)
        return runtime_pb2.RuntimeCheckDeviceUnusedResponse()

    async def RuntimeThawVolume(
        self, request: runtime_pb2.RuntimeThawVolumeRequest, call: Call
    ) -> runtime_pb2.RuntimeThawVolumeResponse:
        """Thaw it, and report whether it was frozen until now; false if its VM has ended meanwhile."""
        record = self._expect(request.volume_target_path)
        handler = await self._in_sandbox(record)
        if handler is None:
            return runtime_pb2.RuntimeThawVolumeResponse(was_frozen=False)
        was_frozen = False
        try:
            if HandlerFeature.FREEZE in handler.features:
                left_s = call.time_remaining()
                was_frozen = await handler_calls.thaw(handler, record.target, left_s)
        except errors.CrustError:
            if await self.entries.holder(record) is not None:
                raise  # else ended since; a release takes a moment
        else:
            self._emit("thawed", record, "" if was_frozen else "it was no longer frozen")
        return runtime_pb2.RuntimeThawVolumeResponse(was_frozen=was_frozen)

    async def RuntimeSetVolumeLimits(
        self, request: runtime_pb2.RuntimeSetVolumeLimitsRequest, call: Call
    ) -> runtime_pb2.RuntimeSetVolumeLimitsResponse:
        """Replace the I/O limits; answers whether a sandbox has the volume, so that they are in force already."""
        target = self._expect(request.volume_target_path).target
        limits = crust_v1.io_limits(request.limits)
        applied = await self.entries.operations.run(
            target, "RuntimeSetVolumeLimits", limits, lambda: self._set_limits(target, limits)
        )
        return runtime_pb2.RuntimeSetVolumeLimitsResponse(applied=applied)

    async def complete_health(
        self,
        record: Record,
        by_driver: csi_pb2.NodeGetVolumeHealthResponse,
        timeout_s: float | None,
    ) -> csi_pb2.NodeGetVolumeHealthResponse:
        """NodeGetVolumeHealth (CSI 1.13): the driver's response with the condition in the guest.

        Raises `HandlerDisconnected`, `handler_calls.HandlerNotResponding` and the handler's own error, unless the
        driver has found something.
        """
        condition = None
        try:
            handler = await self._in_sandbox(record)
            if handler is not None:
                if HandlerFeature.HEALTH in handler.features:
                    condition = await handler_calls.health(handler, record.target, timeout_s)
                condition = await self._condition(handler, record, condition, timeout_s)
        except errors.CrustError:
            if not by_driver.volume_health.health_statuses:
                raise
        if condition is not None and condition.abnormal:
            health = by_driver.volume_health
            health.volume_id = health.volume_id or record.key.volume_id
            message = csi.shortened(condition.message)
            reason = _NOT_GROWN if condition is _OLD_SIZE else REASON
            health.health_statuses.add(status=csi_pb2.DEGRADED, reason=reason, message=message)
        return by_driver

    def _check_unused(self, number: int) -> None:
        source = self.entries.devices.of_number(number)
        if source is not None:
            self.entries.targets.check_given_back(source)

    def _expect(self, text: str) -> Record:
        target = volumes.TargetPath.parse(text, role="volume_target_path")
        record = self.entries.table.expect(target.text)
        add_fields(driver=record.key.driver, volume_id=record.key.volume_id)
        return record

    async def _in_sandbox(self, record: Record) -> RegisteredHandler | None:
        """The handler whose sandbox has the volume or is claiming it; None if no sandbox has it."""
        if await self.entries.holder(record) is None:
            return None
        return await self.handlers.owner(record.handler)

    async def _condition(
        self,
        handler: RegisteredHandler,
        record: Record,
        by_guest: volumes.VolumeCondition | None,
        left_s: float | None,
    ) -> volumes.VolumeCondition | None:
        """The guest's condition; if it is normal, whether the filesystem has its size from before an expansion.

        A device that cannot be read, or hangs, has one thread, and takes neither the guest's numbers nor its
        condition away: the size is not known then, and nothing is said of it.
        """
        is_abnormal = by_guest is not None and by_guest.abnormal
        is_known = record.mount.fs_type in mkfs.SUPPORTED and not record.mount.needs_secrets
        if (
            is_abnormal
            or HandlerFeature.GROW in handler.features
            or record.readonly
            or not is_known
        ):
            return by_guest
        try:
            error = await self.entries.operations.look(
                ("filesystem", record.digest),
                lambda: self.entries.filesystems.not_filled(
                    record, self.entries.devices.size_bytes(record.device)
                ),
                timeout_s=_SUPERBLOCK_S,
                left_s=left_s,
            )
        except errors.CrustError as unread:
            _log.info("the filesystem's size is not known", extra={"error": unread})
            return by_guest
        return by_guest if error is None else _OLD_SIZE

    async def _expand(self, target: volumes.TargetPath, capacity: volumes.CapacityRange) -> int:
        record = self.entries.table.expect(target.text)
        if record.image is None:
            size_bytes = await workers.run(self.entries.devices.size_bytes, record.device)
        else:  # this host cannot see it: the runtime refuses a size that the image does not have
            size_bytes = max(capacity.required_bytes, record.mount.capacity_bytes)
            if size_bytes > record.mount.capacity_bytes:
                await self._change(target, capacity_bytes=size_bytes)
        if capacity.limit_bytes and size_bytes > capacity.limit_bytes:
            raise errors.OutOfRange.named(
                "DeviceTooLarge",
                f"the volume on {record.shown_source} cannot be kept within {capacity.limit_bytes} bytes",
                why=f"the device has {size_bytes} bytes already",
            )
        if size_bytes < capacity.required_bytes:
            raise errors.NotReady.named(
                "DeviceNotExpanded",
                f"the filesystem on {record.shown_source} cannot grow to {capacity.required_bytes} bytes",
                why=f"the device has {size_bytes} bytes",
            )
        handler = await self.handlers.owner(record.handler)
        if HandlerFeature.GROW not in handler.features:
            await self._change(target, capacity_bytes=size_bytes)
            error = await workers.run(self.entries.filesystems.not_filled, record, size_bytes)
            if error is not None:
                raise error
            return size_bytes
        if await self.entries.holder(record) is not None:
            await self._expand_in_sandbox(handler, record, size_bytes, capacity.limit_bytes)
        await self._change(target, capacity_bytes=size_bytes)
        return size_bytes

    async def _expand_in_sandbox(
        self, handler: RegisteredHandler, record: Record, size_bytes: int, limit_bytes: int
    ) -> None:
        if HandlerFeature.ONLINE_EXPAND not in handler.features:
            await self._change(record.target, capacity_bytes=size_bytes)
            raise errors.NotReady.named(
                "OfflineExpansionOnly",
                f"the filesystem of the volume at {record.target.text} was not grown",
                why=f"runtime handler {record.handler!r} does not offer ONLINE_EXPAND, and a sandbox has it mounted",
            )
        capacity = volumes.CapacityRange(size_bytes, limit_bytes)
        filled_bytes = await handler_calls.expand(handler, record.target, capacity)
        if not 0 < filled_bytes <= size_bytes:
            raise crust_v1.ImplausibleStats(
                f"a filesystem of {filled_bytes} bytes on {record.shown_source}, which has {size_bytes} bytes"
            )

    async def _set_limits(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> bool:
        record = self.entries.table.expect(target.text)
        handler = await self.handlers.owner(record.handler)
        enforces = HandlerFeature.IO_LIMITS in handler.features
        if limits != volumes.IoLimits() and not enforces:
            raise unsupported(handler.name, "it has I/O limits", HandlerFeature.IO_LIMITS)

        async def limit_sandbox(to: volumes.IoLimits) -> None:
            if enforces:  # otherwise there are no limits to remove
                await handler_calls.set_limits(handler, target, to)

        holder = current = await self.entries.holder(record)
        if holder is not None:
            await limit_sandbox(limits)
        try:
            await self._change(target, io_limits=limits)
            current = await self.entries.holder(record)
            # a sandbox has claimed the volume meanwhile
            if current is not None and (holder is None or current.claimed_at != holder.claimed_at):
                await limit_sandbox(limits)
        except errors.CrustError:
            try:
                await self._change(target, io_limits=record.mount.io_limits)
                if current is not None:
                    await limit_sandbox(record.mount.io_limits)
            except errors.CrustError as failure:  # the caller gets the first error
                extra = {"volume": str(record.key), "error": failure}
                _log.warning("limits not set back", extra=extra)
            raise
        is_applied = current is not None
        extra = {"volume": str(record.key), "limits": str(limits), "applied": is_applied}
        _log.info("limits set", extra=extra)
        self._emit("limits-set", record, str(limits))
        return is_applied

    async def _change(self, target: volumes.TargetPath, **fields: Any) -> None:
        """Change fields of the mount in a published volume's record. Raises `claims.NotPublished`."""
        changed = await workers.run(self._rewrite, target, fields)
        row = self.entries.table.at(target.text)
        # Meanwhile the volume may have been unpublished, or its record changed again.
        if row is None or row.record is None or changed.record is None:
            return
        if row.record.crust.generation <= changed.record.crust.generation:
            self.entries.table.put(replace(row, entry=changed.entry, devices=changed.devices))

    def _rewrite(self, target: volumes.TargetPath, fields: Mapping[str, Any]) -> TargetRow:
        """Change the present record on disk: an earlier read may be out of date."""
        entry = self.entries.store.read(target)
        if entry is None:
            raise claims.NotPublished(target)
        record = entry.require()
        mount = replace(record.mount, **fields)
        if mount != record.mount:
            entry = self.entries.store.rewrite(entry, mount)
        return self.entries.row_of(entry)

    def _emit(self, kind: str, record: Record, message: str) -> None:
        self.entries.events.emit(Event(kind, record.target.text, record.handler, message))
