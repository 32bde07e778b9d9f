"""KEP-2857's service Runtime without staging, and its extensions; shims and our driver call it.

A caller names a volume by its target path. The record says which handler has the volume, and the proxy calls that
handler. The numbers in the handler's answer finally come from a guest, so they are checked.
"""

from dataclasses import dataclass

from crust.core import errors, volumes
from crust.handoff.record import Record
from crust.proxy.entries import Entries
from crust.proxy.runtimes.expand import DeferredExpand
from crust.proxy.runtimes.freeze import DeferredFreeze
from crust.proxy.runtimes.handlers import Feature, Handlers
from crust.proxy.runtimes.io_limits import DeferredIoLimits
from crust.proxy.runtimes.peers import HandlerPeers
from crust.rpc.call import Call
from crust.rpc.messages import call_fields, crust_v1
from crust.wire.v1 import runtime_pb2


class StagingNotServed(errors.Unsupported):
    """A driver called a method of KEP-2857 that stages; the proxy serves none."""

    def __init__(self, method: str) -> None:
        super().__init__(
            f"{method} is not served",
            why="the proxy publishes an entry from the driver's answer to NodePublishVolume, and from nothing else",
            hint="put a crust shim in front of the driver, or answer with deferred_mount (specs/deferral.md)",
        )


@dataclass(frozen=True, slots=True)
class Mutations:
    """The parts that carry out the calls that change something."""

    expand: DeferredExpand
    freeze: DeferredFreeze
    io_limits: DeferredIoLimits


class RuntimeApi:
    """The service Runtime."""

    def __init__(
        self,
        entries: Entries,
        handlers: Handlers,
        peers: HandlerPeers,
        mutations: Mutations,
    ) -> None:
        self._entries = entries
        self._handlers = handlers
        self._peers = peers
        self._mutations = mutations

    async def RuntimeGetVolumeStats(
        self, request: runtime_pb2.RuntimeGetVolumeStatsRequest, call: Call
    ) -> runtime_pb2.RuntimeGetVolumeStatsResponse:
        """Statistics from the kernel that has the volume mounted."""
        record = self._expect(request.volume_target_path)
        if not await self._entries.is_claimed(record):
            raise errors.NotReady.named(
                "NotMountedInSandbox",
                f"the volume at {record.target.text} is not mounted",
                why="it is published to a runtime, and no sandbox has it now",
                hint="start the pod's sandbox; usage is known once it has mounted the volume",
            )
        handler = await self._handlers.owner(record.handler)
        if Feature.STATS not in handler.features:
            raise errors.NotReady.named(
                "HandlerCannotReport",
                f"there are no statistics of the volume at {record.target}",
                why=f"a sandbox has it, and runtime handler {handler.name!r} does not offer STATS",
                hint="use a handler that offers STATS, or do without: nothing else is affected",
            )
        stats = await self._peers.stats(handler, record.target, call.time_remaining())
        await self._entries.check_fits(record, stats)
        response = runtime_pb2.RuntimeGetVolumeStatsResponse(usage=crust_v1.usages_to_wire(stats))
        if stats.condition is not None:
            response.volume_condition.CopyFrom(crust_v1.condition_to_wire(stats.condition))
        return response

    async def RuntimeExpandVolume(
        self, request: runtime_pb2.RuntimeExpandVolumeRequest, call: Call
    ) -> runtime_pb2.RuntimeExpandVolumeResponse:
        """Grow the filesystem to its device. Without a sandbox only the record changes; the next mount grows it."""
        record = self._expect(request.volume_target_path)
        wanted = crust_v1.capacity_range(request.capacity_range)
        size_bytes = await self._mutations.expand.expand(record, wanted, call.time_remaining())
        return runtime_pb2.RuntimeExpandVolumeResponse(capacity_bytes=size_bytes)

    async def RuntimeStageVolume(
        self, request: runtime_pb2.RuntimeStageVolumeRequest, call: Call
    ) -> runtime_pb2.RuntimeStageVolumeResponse:
        """Not served: raises `StagingNotServed`."""
        raise StagingNotServed("RuntimeStageVolume")

    async def RuntimeUnstageVolume(
        self, request: runtime_pb2.RuntimeUnstageVolumeRequest, call: Call
    ) -> runtime_pb2.RuntimeUnstageVolumeResponse:
        """Not served: raises `StagingNotServed`."""
        raise StagingNotServed("RuntimeUnstageVolume")

    async def RuntimeFreezeVolume(
        self, request: runtime_pb2.RuntimeFreezeVolumeRequest, call: Call
    ) -> runtime_pb2.RuntimeFreezeVolumeResponse:
        """Freeze the filesystem in the sandbox, for a limited time."""
        record = self._expect(request.volume_target_path)
        thaw_after_s = crust_v1.thaw_after_s(request.thaw_after_seconds)
        frozen = await self._mutations.freeze.freeze(record, thaw_after_s, call.time_remaining())
        return runtime_pb2.RuntimeFreezeVolumeResponse(frozen=frozen)

    async def RuntimeThawVolume(
        self, request: runtime_pb2.RuntimeThawVolumeRequest, call: Call
    ) -> runtime_pb2.RuntimeThawVolumeResponse:
        """Thaw it, and report whether it was frozen until now."""
        record = self._expect(request.volume_target_path)
        was_frozen = await self._mutations.freeze.thaw(record, call.time_remaining())
        return runtime_pb2.RuntimeThawVolumeResponse(was_frozen=was_frozen)

    async def RuntimeSetVolumeLimits(
        self, request: runtime_pb2.RuntimeSetVolumeLimitsRequest, call: Call
    ) -> runtime_pb2.RuntimeSetVolumeLimitsResponse:
        """Replace the I/O limits, in the sandbox and in the record."""
        record = self._expect(request.volume_target_path)
        applied = await self._mutations.io_limits.set(record, crust_v1.io_limits(request.limits))
        return runtime_pb2.RuntimeSetVolumeLimitsResponse(applied=applied)

    def _expect(self, text: str) -> Record:
        target = volumes.TargetPath.parse(text, role="volume_target_path")
        record = self._entries.table.expect(target.text)
        call = call_fields.current()
        if call is not None:
            call.name_volume(record.key.driver, record.key.volume_id)
        return record
