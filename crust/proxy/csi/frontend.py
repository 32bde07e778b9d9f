"""The CSI service that the CO calls: it looks at six calls; all others pass through as bytes.

A call for a volume that is not deferred passes through too, byte for byte; `host_publish` checks a publish.
Work of the proxy itself runs as an operation keyed by the volume, and outlives the caller's deadline.
"""

from dataclasses import dataclass
from typing import TypeVar

from crust import errors, operations, volumes
from crust.handoff.record import Record
from crust.proxy.csi import policy
from crust.proxy.csi.backend import Backend, Caller
from crust.proxy.csi.host_publish import HostPublish
from crust.proxy.csi.publish import DeferredPublish
from crust.proxy.csi.unpublish import DeferredUnpublish
from crust.proxy.deferrals.deferred import DeferredVolumes, NoDeferredVolume
from crust.proxy.deferrals.targets import Targets
from crust.proxy.runtimes.volume_health import DeferredHealth
from crust.rpc import outcome, passthrough
from crust.rpc.messages import csi, limits, requests
from crust.wire.csi.v1 import csi_pb2

_NODE = "/csi.v1.Node/"
_LOOK_S = 100.0
_LIMIT_S = 240.0
"""For an operation: the driver's 110 s (`backend`), and as much to undo what it did."""

_INSPECTED = (
    "NodePublishVolume",
    "NodeUnpublishVolume",
    "NodeUnstageVolume",
    "NodeGetVolumeStats",
    "NodeExpandVolume",
    "NodeGetVolumeHealth",
)
T = TypeVar("T")


class StillDeferred(errors.NotReady):
    """The volume cannot be unstaged while it is published to a runtime."""

    def __init__(self, key: volumes.VolumeKey, target: str) -> None:
        super().__init__(
            f"volume {key} cannot be unstaged",
            why=f"it is published to a runtime at {target}",
            hint="unpublish it there first",
        )


@dataclass(frozen=True, slots=True)
class DeferredCalls:
    """The parts that answer calls for deferred volumes."""

    publish: DeferredPublish
    unpublish: DeferredUnpublish
    health: DeferredHealth


class CsiFrontend:
    """The CSI service of one driver's socket."""

    def __init__(
        self,
        driver: volumes.DriverName,
        backend: Backend,
        deferred: DeferredVolumes,
        calls: DeferredCalls,
        targets: Targets,
        decisions: policy.Policy,
    ) -> None:
        self._driver = driver
        self._backend = backend
        self._deferred = deferred
        self._calls = calls
        self._operations = deferred.operations
        self._targets = targets
        self.policy = decisions
        self._host_publish = HostPublish(backend.channel, deferred)
        self._forward = {
            name: passthrough.forward(backend.channel, _NODE + name) for name in _INSPECTED
        }

    async def drain(self) -> None:
        """Refuse new operations, and wait for the running ones."""
        await self._operations.drain()

    def handler(self) -> passthrough.Passthrough:
        """The generic handler for the server."""
        own = {
            _NODE + "NodePublishVolume": passthrough.parsed(
                csi_pb2.NodePublishVolumeRequest, self._node_publish
            ),
            _NODE + "NodeUnpublishVolume": passthrough.parsed(
                csi_pb2.NodeUnpublishVolumeRequest, self._node_unpublish
            ),
            _NODE + "NodeUnstageVolume": passthrough.parsed(
                csi_pb2.NodeUnstageVolumeRequest, self._node_unstage
            ),
            _NODE + "NodeGetVolumeStats": passthrough.parsed(
                csi_pb2.NodeGetVolumeStatsRequest, self._node_stats
            ),
            _NODE + "NodeExpandVolume": passthrough.parsed(
                csi_pb2.NodeExpandVolumeRequest, self._node_expand
            ),
            _NODE + "NodeGetVolumeHealth": passthrough.parsed(
                csi_pb2.NodeGetVolumeHealthRequest, self._node_health
            ),
        }
        return passthrough.Passthrough(self._backend.channel, own)

    async def _node_publish(
        self, request: csi_pb2.NodePublishVolumeRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        decision = await self._decide(request)
        if not decision.defer:
            unchecked = self._unchecked_key(request.volume_id)
            return await self._host_publish.run(unchecked, request, data, context)
        key = self._key(request.volume_id)
        caller = _caller(context)
        response = await self._operations.run(
            key,
            "NodePublishVolume",
            requests.identity(request),
            lambda: self._calls.publish.run(self._backend, key, request, decision, caller),
            also=[volumes.TargetPath(request.target_path)],
            limit_s=_LIMIT_S,
            left_s=context.time_remaining(),
        )
        return response.SerializeToString()

    async def _decide(self, request: csi_pb2.NodePublishVolumeRequest) -> policy.Decision:
        target = request.target_path
        try:
            known = self._deferred.find(target)
        except errors.CrustError:
            known = None  # the publish finds it again, and knows what exists
        if known is not None and known.key.volume_id != request.volume_id:
            known = None
        try:
            return await self.policy.decide(
                flag=request.defer_fs_ops,
                block=request.volume_capability.HasField("block"),
                context=request.volume_context,
                known=known.handler if known is not None else None,
            )
        except errors.CrustError as error:
            begun = known is not None or target in self._deferred.unfinished
            residue = outcome.Residue.EXISTS if begun else outcome.Residue.NONE
            raise outcome.answer("NodePublishVolume", error, residue) from error

    async def _node_unpublish(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        if not self._is_known(request):
            # excluded from operations: otherwise it could overtake a publish whose caller has given up, and the entry
            # of that publish would stay for good
            with self._operations.shared(self._unchecked_key(request.volume_id)):
                if not await self._has_guard(request, context.time_remaining()):
                    response = await self._pass("NodeUnpublishVolume", data, context)
                    self._deferred.raw.ended(request.target_path)
                    return response
        key = self._key(request.volume_id)
        target = volumes.TargetPath.parse(request.target_path)
        caller = _caller(context)
        unpublished = await self._operations.run(
            key,
            "NodeUnpublishVolume",
            requests.identity(request),
            lambda: self._calls.unpublish.run(self._backend, key, target, request, caller),
            also=[target],
            limit_s=_LIMIT_S,
            left_s=context.time_remaining(),
        )
        return unpublished.SerializeToString()

    def _is_known(self, request: csi_pb2.NodeUnpublishVolumeRequest) -> bool:
        """Whether the volume is deferred, by the flag or by the record."""
        try:
            target = volumes.TargetPath.parse(request.target_path)
        except volumes.InvalidPath:
            # another spelling of a deferred target must not reach the driver, which would detach the device
            key = self._unchecked_key(request.volume_id)
            if request.defer_fs_ops or self._deferred.of_volume(key):
                raise
            return False
        if request.defer_fs_ops or target.text in self._deferred.unfinished:
            return True
        return self._deferred.find(target.text) is not None

    async def _has_guard(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, time_left_s: float | None
    ) -> bool:
        """Whether a guard mount is on the target: then the record was lost with /run or by an interrupted
        unpublish.

        Every unpublish of every driver asks, and almost always it is known. Else a thread looks; a CO retries, so a
        target that hangs costs one thread, not one for each retry.
        """
        try:
            target = volumes.TargetPath.parse(request.target_path)
        except volumes.InvalidPath:
            return False
        if self._targets.is_known_unguarded(target):
            return False
        timeout_s = (
            _LOOK_S if time_left_s is None else min(_LOOK_S, time_left_s * operations.ANSWER_AT)
        )
        return await self._operations.look(
            target.text, lambda: self._targets.has_guard(target), timeout_s=timeout_s
        )

    async def _node_unstage(
        self, request: csi_pb2.NodeUnstageVolumeRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        key = self._unchecked_key(request.volume_id)
        with self._operations.shared(key):
            published = self._deferred.of_volume(key)
            if published:
                raise StillDeferred(key, published[0].target.text)
            self._deferred.check_readable(key)
            return await self._pass("NodeUnstageVolume", data, context)

    async def _node_stats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        record = self._deferred.find(request.volume_path)
        if record is None and not request.defer_fs_ops:
            return await self._pass("NodeGetVolumeStats", data, context)
        record = self._deferred.expect(request.volume_path)
        self._deferred.check_key(record, self._key(request.volume_id))
        request.defer_fs_ops = True
        response = await self._backend.stats(request, _caller(context), context.time_remaining())
        return response.SerializeToString()

    async def _node_health(
        self, request: csi_pb2.NodeGetVolumeHealthRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        by_driver = await self._pass("NodeGetVolumeHealth", data, context)
        record = self._deferred.find(request.volume_publish_path)
        key = self._unchecked_key(request.volume_id)
        record = record or next(iter(self._deferred.of_volume(key)), None)
        if record is None:
            return by_driver
        self._deferred.check_key(record, key)
        response = csi_pb2.NodeGetVolumeHealthResponse.FromString(by_driver)
        completed = await self._calls.health.complete(record, response, context.time_remaining())
        return completed.SerializeToString()

    async def _node_expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        record = self._to_expand(request)
        if record is None:
            return await self._pass("NodeExpandVolume", data, context)
        key = self._key(request.volume_id)
        self._deferred.check_key(record, key)
        csi.capacity_range(request.capacity_range)
        request.defer_fs_ops = True
        request.volume_path = record.target.text
        caller = _caller(context)
        response = await self._operations.run(
            key,
            "NodeExpandVolume",
            requests.identity(request),
            lambda: self._backend.expand(request, caller),
            limit_s=_LIMIT_S,
            left_s=context.time_remaining(),
        )
        return response.SerializeToString()

    def _to_expand(self, request: csi_pb2.NodeExpandVolumeRequest) -> Record | None:
        """The record by path; or by volume, because a CO may send the staging path (CSI NodeExpandVolume)."""
        key = self._unchecked_key(request.volume_id)
        record = self._deferred.find(request.volume_path)
        record = record or next(iter(self._deferred.of_volume(key)), None)
        if record is None:
            self._deferred.check_readable(key)
        if record is None and request.defer_fs_ops:
            raise NoDeferredVolume(request.volume_path)
        return record

    def _unchecked_key(self, volume_id: str) -> volumes.VolumeKey:
        """For pass-through calls: the driver checks the id and words the error."""
        return volumes.VolumeKey(self._driver, volumes.VolumeId(volume_id))

    def _key(self, volume_id: str) -> volumes.VolumeKey:
        return volumes.VolumeKey(self._driver, limits.volume_id_of_any_driver(volume_id))

    async def _pass(self, name: str, data: bytes, context: passthrough.Context) -> bytes:
        return await self._forward[name](data, context)


def _caller(context: passthrough.Context) -> Caller:
    return Caller(passthrough.metadata_of(context))
