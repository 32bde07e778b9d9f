"""CSI Node: decode, call, encode. A change of the host runs as a keyed operation and outlives its caller."""

from dataclasses import dataclass, field

from crust.blockdriver.engines.pool_access import Access
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.node_expand import Expand, NodeExpand, NotPublishedAtPath
from crust.blockdriver.node.node_stage import NodeStage, Stage
from crust.blockdriver.node.node_stats import NodeStats, StatsQuery
from crust.blockdriver.node.node_unpublish import NodeUnpublish, NodeUnstage
from crust.blockdriver.node.publish.deferred_publish import DeferredNodePublish
from crust.blockdriver.node.publish.node_publish import NodePublish
from crust.blockdriver.node.publish.publish_rules import Publish
from crust.blockdriver.records.health import HealthCheck, Kind
from crust.blockdriver.records.stores import Stores
from crust.blockdriver.services.calls import Calls, health
from crust.blockdriver.services.roles import Role
from crust.core import deferral_keys, errors, volumes
from crust.host.process import workers
from crust.rpc import status
from crust.rpc.call import Call
from crust.rpc.messages import csi, extensions
from crust.rpc.serving.service import as_crust_error
from crust.wire.csi.v1 import csi_pb2

_Rpc = csi_pb2.NodeServiceCapability.RPC
_CAPABILITIES = (
    _Rpc.STAGE_UNSTAGE_VOLUME,
    _Rpc.GET_VOLUME_STATS,
    _Rpc.EXPAND_VOLUME,
    _Rpc.SINGLE_NODE_MULTI_WRITER,
    _Rpc.VOLUME_MOUNT_GROUP,
)
_HEALTH = {
    "1.12": (_Rpc.VOLUME_CONDITION,),
    "1.13": (_Rpc.GET_VOLUME_HEALTH, _Rpc.GET_STORAGE_HEALTH),
}
_DEFERRAL = (
    _Rpc.DEFER_FS_OPS,
    _Rpc.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP,
    _Rpc.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY,
)
_KEPT = (deferral_keys.PASSPHRASE, deferral_keys.USER_ID, deferral_keys.USER_KEY)
"""The secrets of a stage that a publish needs."""


@dataclass(frozen=True, slots=True)
class Node:
    role: Role
    stores: Stores
    io_limits: IoLimits
    node_stage: NodeStage
    node_unstage: NodeUnstage
    node_publish: NodePublish
    deferred_publish: DeferredNodePublish
    node_unpublish: NodeUnpublish
    node_expand: NodeExpand
    node_stats: NodeStats
    health_check: HealthCheck
    calls: Calls
    _secrets: dict[tuple[volumes.VolumeId, str], dict[str, str]] = field(
        default_factory=dict, repr=False
    )
    """The secrets that open staged volumes, by volume and staging path. In memory only."""

    async def NodeGetCapabilities(
        self, request: csi_pb2.NodeGetCapabilitiesRequest, call: Call
    ) -> csi_pb2.NodeGetCapabilitiesResponse:
        """The capabilities; deferral only for callers that opt in."""
        types = [*_CAPABILITIES, *_HEALTH[self.role.csi_profile]]
        if extensions.requested(call.metadata, extensions.NODE_INFO) and self.role.attaches:
            types.extend((_Rpc.GET_ID, _Rpc.NODE_INFO_FROM_CONTROLLER))
        if extensions.requested(call.metadata, extensions.DEFERRAL):
            types.extend(_DEFERRAL)
        return csi_pb2.NodeGetCapabilitiesResponse(
            capabilities=[csi_pb2.NodeServiceCapability(rpc=_Rpc(type=kind)) for kind in types]
        )

    async def NodeGetInfo(
        self, request: csi_pb2.NodeGetInfoRequest, call: Call
    ) -> csi_pb2.NodeGetInfoResponse:
        """The node's id, topology and attach limit; the id alone for a CO that asks the controller for the rest."""
        response = csi_pb2.NodeGetInfoResponse(node_id=self.stores.node_id)
        # Not without the opt-in: to another CO field 1 of a later CSI may mean something else.
        if not (
            request.controller_get_node_info
            and extensions.requested(call.metadata, extensions.NODE_INFO)
        ):
            response.max_volumes_per_node = self.stores.attach_slots.limit
            for place in self.calls.places:
                response.accessible_topology.CopyFrom(place)
        if extensions.requested(call.metadata, extensions.DEFERRAL):
            response.supported_file_systems.extend(self.stores.supported.fs_types)
        return response

    async def NodeGetID(
        self, request: csi_pb2.NodeGetIDRequest, call: Call
    ) -> csi_pb2.NodeGetIDResponse:
        """CSI PR #603, first shape: the id that NodeGetInfo returns."""
        return csi_pb2.NodeGetIDResponse(node_id=self.stores.node_id)

    async def NodeGetVolumeHealth(
        self, request: csi_pb2.NodeGetVolumeHealthRequest, call: Call
    ) -> csi_pb2.NodeGetVolumeHealthResponse:
        """CSI 1.13. Problems of the volume's mount and of its image."""
        self.role.require("1.13")
        volume_id = csi.volume_id(request.volume_id)
        path = None
        if text := request.volume_publish_path:
            path = volumes.TargetPath.parse(text, role="volume_publish_path")
        if text := request.staging_target_path:
            volumes.TargetPath.parse(text, role="staging_target_path")
        volume_health = await self.node_stats.examine(volume_id, path)
        return csi_pb2.NodeGetVolumeHealthResponse(volume_health=health(volume_health))

    async def NodeGetStorageHealth(
        self, request: csi_pb2.NodeGetStorageHealthRequest, call: Call
    ) -> csi_pb2.NodeGetStorageHealthResponse:
        self.role.require("1.13")
        pb = csi_pb2.NodeGetStorageHealthResponse()
        for finding in await self.calls.read((), self.health_check.pool, call):
            is_degraded = finding.kind is Kind.DEGRADED
            pb.backend_health.add(
                status=csi_pb2.STORAGE_DEGRADED if is_degraded else csi_pb2.STORAGE_UNREACHABLE,
                reason=finding.reason,
                message=csi.shortened(finding.message),
            )
        return pb

    async def NodeStageVolume(
        self, request: csi_pb2.NodeStageVolumeRequest, call: Call
    ) -> csi_pb2.NodeStageVolumeResponse:
        """Attach, format if new, check, grow; mounts nothing."""
        volume_id = csi.volume_id(request.volume_id)
        path = volumes.TargetPath.parse(request.staging_target_path, role="staging_target_path")
        capability = _capability(request)
        access = Access(
            capability.mode,
            readonly=capability.mode.reader_only,
            on_host=isinstance(capability.access, volumes.BlockAccess),
            secrets=dict(request.secrets),
        )
        kernel = extensions.guest_kernel(call.metadata)
        stage = Stage(volume_id, path, capability, access, kernel)
        try:
            await self.calls.change(volume_id, stage, lambda: self.node_stage.stage(stage), call)
        except Exception as error:  # a CO forgets a stage after a final code, and never unstages it
            refusal = as_crust_error("NodeStageVolume", "the driver", error)
            residue = status.Residue.NONE
            if isinstance(refusal, errors.Conflict):
                residue = status.Residue.OTHER
            elif await workers.run(self.node_stage.may_be_left, volume_id):
                residue = status.Residue.EXISTS
            raise status.allowed_error("NodeStageVolume", refusal, residue) from error
        if secrets := _kept_secrets(request):
            self._secrets[volume_id, path.text] = secrets
        return csi_pb2.NodeStageVolumeResponse()

    async def NodeUnstageVolume(
        self, request: csi_pb2.NodeUnstageVolumeRequest, call: Call
    ) -> csi_pb2.NodeUnstageVolumeResponse:
        volume_id = csi.volume_id(request.volume_id)
        path = volumes.TargetPath.parse(request.staging_target_path, role="staging_target_path")
        await self.calls.change(
            volume_id, path, lambda: workers.run(self.node_unstage.unstage, volume_id, path), call
        )
        self._secrets.pop((volume_id, path.text), None)
        return csi_pb2.NodeUnstageVolumeResponse()

    async def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest, call: Call
    ) -> csi_pb2.NodePublishVolumeResponse:
        """Mount on the host, or return the data by which a guest mounts."""
        volume_id = csi.volume_id(request.volume_id)
        target = volumes.TargetPath.parse(request.target_path)
        capability, staging = _capability(request), request.staging_target_path
        if not staging:
            raise csi.StagingPathNotGiven()
        publish = Publish(
            volume_id=volume_id,
            target=target,
            staging=volumes.TargetPath.parse(staging, role="staging_target_path"),
            capability=capability,
            readonly=request.readonly,
            deferred=request.defer_fs_ops,
            volume_context=tuple(sorted(request.volume_context.items())),
            publish_context=tuple(sorted(request.publish_context.items())),
            secrets=self._secrets.get((volume_id, staging), {}) | _kept_secrets(request),
            nobody_grows=request.defer_fs_ops
            and extensions.requested(call.metadata, extensions.NOBODY_GROWS),
        )
        deferred = await self.calls.change(
            publish.volume_id,
            (publish.target, publish.fingerprint),  # a retry with fresh tokens joins
            lambda: (
                workers.run(self.deferred_publish.publish_to_guest, publish)
                if publish.deferred
                else self.node_publish.publish_on_host(publish)
            ),
            call,
            ended_by=publish.target,  # the identity of its unpublish
        )
        if deferred is None:
            return csi_pb2.NodePublishVolumeResponse()
        return csi_pb2.NodePublishVolumeResponse(
            deferred_mount=csi.deferred_mount_to_wire(deferred)
        )

    async def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, call: Call
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        volume_id = csi.volume_id(request.volume_id)
        target = volumes.TargetPath.parse(request.target_path)
        await self.calls.change(
            volume_id,
            target,
            lambda: workers.run(self.node_unpublish.unpublish, volume_id, target),
            call,
        )
        return csi_pb2.NodeUnpublishVolumeResponse()

    async def NodeGetVolumeStats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, call: Call
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        """Usage and condition; never blocks on a hung volume or another operation."""
        volume_id = csi.volume_id(request.volume_id)
        path = self._path(volume_id, request.volume_path)
        query = StatsQuery(volume_id, path, request.defer_fs_ops)
        return csi.stats_to_wire(await self.node_stats.measure(query))

    async def NodeExpandVolume(
        self, request: csi_pb2.NodeExpandVolumeRequest, call: Call
    ) -> csi_pb2.NodeExpandVolumeResponse:
        """Grow the device and the filesystem; with deferral only the device."""
        volume_id = csi.volume_id(request.volume_id)
        expand = Expand(
            volume_id,
            self._path(volume_id, request.volume_path),
            csi.capacity_range(request.capacity_range),
            request.defer_fs_ops,
            csi.capability(request.volume_capability)
            if request.HasField("volume_capability")
            else None,
            dict(request.secrets),
        )
        size_bytes = await self.calls.change(
            expand.volume_id, expand, lambda: self.node_expand.expand(expand), call
        )
        return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=size_bytes)

    def _path(self, volume_id: volumes.VolumeId, text: str) -> volumes.TargetPath:
        """The path of a volume. NOT_FOUND comes before any error about the form of the path.

        Raises `MissingField`, `VolumeNotFound`, and `NotPublishedAtPath` for a path where no volume can be.
        """
        csi.required(text, "volume_path", limit_bytes=volumes.PATH_MAX_BYTES - 1)
        # another process may have made the volume at this moment
        if not self.stores.node_state.staging_paths(volume_id):
            self.stores.volume_records.check_known(volume_id)
        try:
            return volumes.TargetPath.parse(text, role="volume_path")
        except volumes.InvalidPath as err:
            raise NotPublishedAtPath(volume_id, text[:200]) from err


def _kept_secrets(
    request: csi_pb2.NodeStageVolumeRequest | csi_pb2.NodePublishVolumeRequest,
) -> dict[str, str]:
    return {key: request.secrets[key] for key in _KEPT if request.secrets.get(key)}


def _capability(
    request: csi_pb2.NodeStageVolumeRequest | csi_pb2.NodePublishVolumeRequest,
) -> volumes.VolumeCapability:
    """The capability of a request whose contexts are not too long."""
    if not request.HasField("volume_capability"):
        raise csi.MissingField("volume_capability")
    capability = csi.capability(request.volume_capability)
    csi.check_context(request.volume_context, "volume_context")
    csi.check_context(request.publish_context, "publish_context")
    return capability
