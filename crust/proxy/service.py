"""The CSI service that the CO calls: it looks at seven calls; all others pass as bytes, a Probe too.

A call for a volume that is not deferred passes through too, byte for byte. Work of the proxy itself runs as an
operation that has the volume and the target, and outlives the caller's deadline.
"""

from dataclasses import replace

from crust.core import deferral_keys, errors, volumes
from crust.handoff import claims
from crust.handoff.record import Record
from crust.host.process import workers
from crust.proxy.host_publish import HostPublish
from crust.proxy.policy import Policy
from crust.proxy.runtime_api import RuntimeApi
from crust.proxy.target import MountStack, other_volume
from crust.rpc.call import Call, Metadata, add_fields, identity_of
from crust.rpc.csi_driver import CHANGE_TIMEOUT_S, CsiDriver, with_opt_in
from crust.rpc.messages import csi, extensions
from crust.rpc.port import decoded
from crust.rpc.serving.service import Methods, csi_methods
from crust.wire.csi.v1 import csi_pb2

_LOOK_S = 100.0
_LIMIT_S = 240.0
"""For an operation: the driver's 110 s (`CHANGE_TIMEOUT_S`), and as much for the undo."""


class CsiService:
    """The CSI service of one driver's socket. All drivers share the publishes and the Runtime API."""

    def __init__(
        self,
        backend: CsiDriver,
        on_host: HostPublish,
        runtime: RuntimeApi,
        decisions: Policy,
        driver: str,
    ) -> None:
        self._driver = volumes.DriverName(driver)
        self._backend = backend
        self._on_host = on_host
        self._publish = on_host.publish
        self._runtime = runtime
        self._entries = on_host.entries
        self._table = self._entries.table
        self._operations = self._entries.operations
        self.policy = decisions

    def methods(self) -> Methods:
        return csi_methods(
            "Node",
            {
                "NodeStageVolume": self._node_stage,
                "NodePublishVolume": self._node_publish,
                "NodeUnpublishVolume": self._node_unpublish,
                "NodeUnstageVolume": self._node_unstage,
                "NodeGetVolumeStats": self._node_stats,
                "NodeExpandVolume": self._node_expand,
                "NodeGetVolumeHealth": self._node_health,
            },
        )

    async def _node_stage(
        self, request: csi_pb2.NodeStageVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        """Pass the stage on, with the decision for a shim that wraps the driver, and the guests' kernel."""
        is_raw = request.volume_capability.HasField("block")
        is_block = not is_raw and self.policy.may_defer(request.volume_context)
        kernel = ""
        if is_block and self.policy.always_defers(request.volume_context):
            named = request.volume_context.get(deferral_keys.RUNTIME_HANDLER)
            kernel = self._publish.handlers.guest_kernel(named)
        call.metadata = extensions.staged_as(call.metadata, block=is_block, guest_kernel=kernel)
        return await self._backend.port.forward(call, data)

    async def _node_publish(
        self, request: csi_pb2.NodePublishVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        row = self._table.at(request.target_path)
        record = row.record if row is not None else None
        if record is not None and record.key.volume_id != request.volume_id:
            record = None
        try:
            decision = await self.policy.decide(
                flag=request.defer_fs_ops,
                block=request.volume_capability.HasField("block"),
                context=request.volume_context,
                known=record.handler if record is not None else None,
            )
        except Exception as error:
            raise self._publish.refuse(request.target_path, error) from error
        add_fields(decided_by=decision.decider)
        if not decision.defer:
            return await self._publish_on_host(request, data, call)
        if self.policy.runtimes is not None:
            uid = request.volume_context.get(f"{deferral_keys.POD_INFO}uid", "")
            takes_sub_path = self.policy.runtimes.takes_sub_paths(uid)
            decision = replace(decision, takes_sub_path=takes_sub_path)
        key = self._key(request.volume_id)
        metadata = with_opt_in(call)
        response = await self._operations.run(
            key,
            "NodePublishVolume",
            identity_of(request),
            lambda: self._publish.defer(self._backend, key, request, decision, metadata),
            also=[volumes.TargetPath(request.target_path)],
            limit_s=_LIMIT_S,
            left_s=call.time_remaining(),
        )
        return response.SerializeToString()

    async def _publish_on_host(
        self, request: csi_pb2.NodePublishVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        """Pass the publish on, after a check that it cannot affect a deferred one."""
        key = self._unchecked_key(request.volume_id)
        target = volumes.TargetPath(request.target_path)  # unchecked: the driver checks it
        with self._operations.shared(key), self._operations.shared(target, "NodePublishVolume"):
            row, is_new = await self._on_host.begin(key, request)
            response = await self._backend.port.forward(call, data)
            if self._table.reservations():
                metadata = call.metadata
                await self._on_host.check_device(
                    row, request, self._backend, metadata, is_new=is_new
                )
            return response

    async def _node_unpublish(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        if not (request.defer_fs_ops or self._table.at(request.target_path)):
            unchecked = self._unchecked_key(request.volume_id)
            if self._table.of(unchecked):
                # another spelling of a deferred target must not reach the driver, which would detach the device
                volumes.TargetPath.parse(request.target_path)
            # excluded from operations: otherwise it could overtake a publish whose caller has given up, and the entry
            # of that publish would stay for good
            with self._operations.shared(unchecked):
                await self._check_no_link(request, call.time_remaining())
                return await self._backend.port.forward(call, data)
        key = self._key(request.volume_id)
        target = volumes.TargetPath.parse(request.target_path)
        metadata = with_opt_in(call)
        unpublished = await self._operations.run(
            key,
            "NodeUnpublishVolume",
            identity_of(request),
            lambda: self._publish.unpublish.unpublish(
                self._backend, key, target, request, metadata
            ),
            also=[target],
            limit_s=_LIMIT_S,
            left_s=call.time_remaining(),
        )
        return unpublished.SerializeToString()

    async def _check_no_link(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, time_left_s: float | None
    ) -> None:
        """Raise `InvalidPath` if a guard is on the target although no row says so: a link leads to one.

        Each unpublish on the host comes here, and almost none concerns a row. For the others a thread looks: a target
        that hangs costs one thread, not one for each retry of the CO.
        """
        path = request.target_path
        if not self._table.concerns(self._unchecked_key(request.volume_id)):
            return
        try:
            target = volumes.TargetPath.parse(path)
        except volumes.InvalidPath:
            return
        seen = await self._operations.look(
            path, lambda: self._entries.targets.look(target), timeout_s=_LOOK_S, left_s=time_left_s
        )
        if seen.stack in (MountStack.GUARD, MountStack.BURIED):
            raise volumes.InvalidPath("target_path", path, "a link leads from it to a guard mount")

    async def _node_unstage(
        self, request: csi_pb2.NodeUnstageVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        key = self._unchecked_key(request.volume_id)
        with self._operations.shared(key):
            await workers.run(self._entries.filesystems.locks.check_free, str(key))
            self._table.check_readable(key)
            for row in self._table.of(key):
                raise errors.NotReady.named(
                    "StillDeferred",
                    f"volume {key} cannot be unstaged",
                    why=f"it is published to a runtime at {row.path}",
                )
            return await self._backend.port.forward(call, data)

    async def _node_stats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, data: bytes, call: Call
    ) -> bytes:
        record = self._table.find(request.volume_path)
        if record is None and not request.defer_fs_ops:
            return await self._backend.port.forward(call, data)
        _check_key(self._table.expect(request.volume_path), self._key(request.volume_id))
        request.defer_fs_ops = True
        left_s = call.time_remaining()  # the caller's own deadline: it changes nothing
        await self._backend.check_defers(left_s)
        response = await self._backend.node.NodeGetVolumeStats(
            request, metadata=with_opt_in(call), timeout=left_s
        )
        return response.SerializeToString()

    async def _node_health(
        self, request: csi_pb2.NodeGetVolumeHealthRequest, data: bytes, call: Call
    ) -> bytes:
        by_driver = await self._backend.port.forward(call, data)
        key = self._unchecked_key(request.volume_id)
        record = self._table.find(request.volume_publish_path) or self._of_volume(key)
        if record is None:
            return by_driver
        _check_key(record, key)
        read = csi_pb2.NodeGetVolumeHealthResponse.FromString
        response = decoded(read, by_driver, call.method)
        completed = await self._runtime.complete_health(record, response, call.time_remaining())
        return completed.SerializeToString()

    async def _node_expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        key = self._unchecked_key(request.volume_id)
        # by path; or by volume, because a CO may send the staging path (CSI NodeExpandVolume)
        record = self._table.find(request.volume_path) or self._of_volume(key)
        if record is None:
            self._table.check_readable(key)
            if request.defer_fs_ops:
                raise claims.NotPublished(request.volume_path)
            return await self._backend.port.forward(call, data)
        _check_key(record, self._key(request.volume_id))
        csi.capacity_range(request.capacity_range)
        request.defer_fs_ops = True
        request.volume_path = record.target.text
        metadata = with_opt_in(call)
        response = await self._operations.run(
            key,
            "NodeExpandVolume",
            identity_of(request),
            lambda: self._expand(request, metadata),
            limit_s=_LIMIT_S,
            left_s=call.time_remaining(),
        )
        return response.SerializeToString()

    async def _expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, metadata: Metadata
    ) -> csi_pb2.NodeExpandVolumeResponse:
        await self._backend.check_defers()
        return await self._backend.node.NodeExpandVolume(
            request, metadata=metadata, timeout=CHANGE_TIMEOUT_S
        )

    def _of_volume(self, key: volumes.VolumeKey) -> Record | None:
        return next((row.record for row in self._table.of(key) if row.record is not None), None)

    def _unchecked_key(self, volume_id: str) -> volumes.VolumeKey:
        """For pass-through calls: the driver checks the id and words the error."""
        return volumes.VolumeKey(self._driver, volumes.VolumeId(volume_id))

    def _key(self, volume_id: str) -> volumes.VolumeKey:
        return volumes.VolumeKey(self._driver, csi.volume_id_of_any_driver(volume_id))


def _check_key(record: Record, key: volumes.VolumeKey) -> None:
    if record.key != key:
        raise other_volume(record.target.text, key, record.key)
