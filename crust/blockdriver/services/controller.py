"""CSI Controller: decode, call, encode. RPCs that are not here are UNIMPLEMENTED and not advertised."""

import contextlib
from dataclasses import dataclass
from typing import Any

import grpc.aio

from crust import errors, operations, volumes
from crust.blockdriver.controller import get_capacity, io_limit_parameters
from crust.blockdriver.controller.coalesce import Coalescer
from crust.blockdriver.controller.controller_publish import ControllerPublish, PublishRequest
from crust.blockdriver.controller.create_volume import Create, Provisioner, Volume
from crust.blockdriver.controller.get_capacity import CapacityReport
from crust.blockdriver.controller.list_volumes import VolumeLister
from crust.blockdriver.controller.modify_volume import Change, Expansion, Outcome, VolumeModifier
from crust.blockdriver.records.health import HealthCheck
from crust.blockdriver.services import deadlines, responses, snapshot_calls
from crust.blockdriver.services.deadlines import Reads
from crust.blockdriver.services.node_identity import NODE_ID_MAX_BYTES, NodeIdentity
from crust.blockdriver.services.snapshot_calls import SnapshotCalls
from crust.rpc import csi, extensions, limits
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
_Rpc = csi_pb2.ControllerServiceCapability.RPC
_CAPABILITIES = (
    _Rpc.CREATE_DELETE_VOLUME,
    _Rpc.PUBLISH_UNPUBLISH_VOLUME,
    _Rpc.PUBLISH_READONLY,
    _Rpc.LIST_VOLUMES,
    _Rpc.LIST_VOLUMES_PUBLISHED_NODES,
    _Rpc.GET_VOLUME,
    _Rpc.GET_CAPACITY,
    _Rpc.EXPAND_VOLUME,
    _Rpc.MODIFY_VOLUME,
    _Rpc.CREATE_DELETE_SNAPSHOT,
    _Rpc.LIST_SNAPSHOTS,
    _Rpc.GET_SNAPSHOT,
    _Rpc.CLONE_VOLUME,
    _Rpc.SINGLE_NODE_MULTI_WRITER,
)
_NOT_IN_NODE_DEPLOYMENT = frozenset(
    {
        _Rpc.PUBLISH_UNPUBLISH_VOLUME,
        _Rpc.PUBLISH_READONLY,
        _Rpc.LIST_VOLUMES_PUBLISHED_NODES,
        _Rpc.EXPAND_VOLUME,
        _Rpc.MODIFY_VOLUME,
        _Rpc.GET_NODE_INFO,
    }
)
_NOT_IN_SHARED_POOL = frozenset(
    {
        _Rpc.PUBLISH_UNPUBLISH_VOLUME,
        _Rpc.PUBLISH_READONLY,
        _Rpc.LIST_VOLUMES_PUBLISHED_NODES,
        _Rpc.GET_NODE_INFO,
    }
)
_HEALTH = {
    "1.12": (_Rpc.VOLUME_CONDITION,),
    "1.13": (_Rpc.GET_VOLUME_HEALTH, _Rpc.LIST_VOLUME_HEALTH),
}


@dataclass(frozen=True, slots=True)
class ControllerRules:
    """The rules of the controller part; tests call them without a server."""

    provisioner: Provisioner
    publisher: ControllerPublish
    lister: VolumeLister
    health_check: HealthCheck
    capacity_report: CapacityReport
    snapshots: SnapshotCalls
    modifier: VolumeModifier
    coalescer: Coalescer


class Controller(csi_pb2_grpc.ControllerServicer):
    """The Controller service."""

    def __init__(
        self,
        identity: NodeIdentity,
        rules: ControllerRules,
        running: operations.KeyedOperations,
        reads: Reads,
    ) -> None:
        self._identity = identity
        self._reads = reads
        self._rules = rules
        self._provisioner = rules.provisioner
        self._running = running

    async def ControllerGetCapabilities(
        self, request: csi_pb2.ControllerGetCapabilitiesRequest, context: Context
    ) -> csi_pb2.ControllerGetCapabilitiesResponse:
        """The capabilities of the CSI profile; crust's extensions only for callers that opt in."""
        types = [*_CAPABILITIES, *_HEALTH[self._identity.csi_profile]]
        if extensions.node_info_requested(context):
            types.append(_Rpc.GET_NODE_INFO)
        if self._identity.role.node_deployment:
            types = [each for each in types if each not in _NOT_IN_NODE_DEPLOYMENT]
        if self._identity.role.is_shared:
            types = [each for each in types if each not in _NOT_IN_SHARED_POOL]
        capabilities = [csi_pb2.ControllerServiceCapability(rpc=_Rpc(type=each)) for each in types]
        return csi_pb2.ControllerGetCapabilitiesResponse(capabilities=capabilities)

    async def CreateVolume(
        self, request: csi_pb2.CreateVolumeRequest, context: Context
    ) -> csi_pb2.CreateVolumeResponse:
        """Idempotent by name."""
        create = _create(request)
        key = self._key(self._rules.provisioner.pool.ids.volume_id(create.name))

        async def work() -> Volume:
            with self._with_source(create, key):
                return await self._provisioner.create(create)

        volume = await deadlines.change(self._running, key, "CreateVolume", create, work, context)
        return csi_pb2.CreateVolumeResponse(volume=responses.volume(volume, self._identity.segment))

    async def DeleteVolume(
        self, request: csi_pb2.DeleteVolumeRequest, context: Context
    ) -> csi_pb2.DeleteVolumeResponse:
        """Idempotent: absent is a success."""
        volume_id = limits.volume_id(request.volume_id)
        await deadlines.change(
            self._running,
            self._key(volume_id),
            "DeleteVolume",
            None,
            lambda: self._provisioner.delete(volume_id),
            context,
        )
        return csi_pb2.DeleteVolumeResponse()

    async def CreateSnapshot(
        self, request: csi_pb2.CreateSnapshotRequest, context: Context
    ) -> csi_pb2.CreateSnapshotResponse:
        """Idempotent by name; a point-in-time copy."""
        return await self._rules.snapshots.create(request, context)

    async def DeleteSnapshot(
        self, request: csi_pb2.DeleteSnapshotRequest, context: Context
    ) -> csi_pb2.DeleteSnapshotResponse:
        """Idempotent: absent is a success."""
        return await self._rules.snapshots.delete(request, context)

    async def ListSnapshots(
        self, request: csi_pb2.ListSnapshotsRequest, context: Context
    ) -> csi_pb2.ListSnapshotsResponse:
        """Ordered by id."""
        return await self._rules.snapshots.list(request)

    async def GetSnapshot(
        self, request: csi_pb2.GetSnapshotRequest, context: Context
    ) -> csi_pb2.GetSnapshotResponse:
        """One entry of the list."""
        return await self._rules.snapshots.get(request)

    async def ControllerPublishVolume(
        self, request: csi_pb2.ControllerPublishVolumeRequest, context: Context
    ) -> csi_pb2.ControllerPublishVolumeResponse:
        """Idempotent by volume and node."""
        attach = _attach(request)
        await deadlines.change(
            self._running,
            self._key(attach.volume_id),
            "ControllerPublishVolume",
            attach,
            lambda: self._rules.publisher.publish(attach),
            context,
        )
        return csi_pb2.ControllerPublishVolumeResponse()

    async def ControllerUnpublishVolume(
        self, request: csi_pb2.ControllerUnpublishVolumeRequest, context: Context
    ) -> csi_pb2.ControllerUnpublishVolumeResponse:
        """Idempotent; without a node id, from all nodes."""
        volume_id = limits.volume_id(request.volume_id)
        node_id = limits.optional(request.node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
        await deadlines.change(
            self._running,
            self._key(volume_id),
            "ControllerUnpublishVolume",
            node_id,
            lambda: self._rules.publisher.unpublish(volume_id, node_id),
            context,
        )
        return csi_pb2.ControllerUnpublishVolumeResponse()

    async def ListVolumes(
        self, request: csi_pb2.ListVolumesRequest, context: Context
    ) -> csi_pb2.ListVolumesResponse:
        """Ordered by id, with the nodes that have each volume."""
        wanted = (request.max_entries, request.starting_token)
        page, token = await self._reads.read(
            "ListVolumes", wanted, lambda: self._rules.lister.page(*wanted), context
        )
        return csi_pb2.ListVolumesResponse(
            entries=[
                responses.entry(
                    each, self._identity.segment, tell_condition=self._identity.tells_condition
                )
                for each in page
            ],
            next_token=token,
        )

    async def ControllerGetVolume(
        self, request: csi_pb2.ControllerGetVolumeRequest, context: Context
    ) -> csi_pb2.ControllerGetVolumeResponse:
        """One entry of the list."""
        volume_id = limits.volume_id(request.volume_id)
        found = await self._reads.read(
            "ControllerGetVolume", volume_id, lambda: self._rules.lister.get(volume_id), context
        )
        return responses.got(
            found, self._identity.segment, tell_condition=self._identity.tells_condition
        )

    async def ControllerListVolumeHealth(
        self, request: csi_pb2.ControllerListVolumeHealthRequest, context: Context
    ) -> csi_pb2.ControllerListVolumeHealthResponse:
        """CSI 1.13. Includes volumes that have only a record or only an image."""
        self._identity.require("1.13")
        wanted = (request.max_entries, request.starting_token)
        page, token = await self._reads.read(
            "ControllerListVolumeHealth",
            wanted,
            lambda: self._rules.lister.health_page(*wanted),
            context,
        )
        return csi_pb2.ControllerListVolumeHealthResponse(
            entries=[responses.health(each) for each in page], next_token=token
        )

    async def ControllerGetVolumeHealth(
        self, request: csi_pb2.ControllerGetVolumeHealthRequest, context: Context
    ) -> csi_pb2.ControllerGetVolumeHealthResponse:
        """CSI 1.13."""
        self._identity.require("1.13")
        volume_id = limits.volume_id(request.volume_id)
        found = await self._reads.read(
            "ControllerGetVolumeHealth",
            volume_id,
            lambda: self._rules.health_check.examine(volume_id),
            context,
        )
        return csi_pb2.ControllerGetVolumeHealthResponse(volume_health=responses.health(found))

    async def GetCapacity(
        self, request: csi_pb2.GetCapacityRequest, context: Context
    ) -> csi_pb2.GetCapacityResponse:
        """The free capacity for volumes with these capabilities in this topology."""
        asked = get_capacity.CapacityQuery(
            tuple(csi.capability(each) for each in request.volume_capabilities),
            tuple(sorted(limits.mapping(request.parameters, "parameters").items())),
            responses.topology_of(request),
        )
        available = await self._reads.read(
            "GetCapacity", asked, lambda: self._rules.capacity_report.available(asked), context
        )
        response = csi_pb2.GetCapacityResponse(available_capacity=available.available_bytes)
        response.maximum_volume_size.value = available.maximum_bytes
        response.minimum_volume_size.value = available.minimum_bytes
        return response

    async def ControllerGetNodeInfo(
        self, request: csi_pb2.ControllerGetNodeInfoRequest, context: Context
    ) -> csi_pb2.ControllerGetNodeInfoResponse:
        """CSI PR #603: NodeGetInfo's answer, and the volumes that have a slot there (specs/node-identity.md)."""
        node_id = limits.required(request.node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
        known = frozenset(
            limits.required(each, "published_volume_ids") for each in request.published_volume_ids
        )
        slots = await self._reads.read(
            "ControllerGetNodeInfo",
            (node_id, known),
            lambda: self._rules.publisher.slots(node_id, known),
            context,
        )
        response = csi_pb2.ControllerGetNodeInfoResponse(
            max_volumes_per_node=slots.limit, published_volume_ids=slots.taken
        )
        for place in responses.places(self._identity.segment):
            response.accessible_topology.CopyFrom(place)
        return response

    async def ValidateVolumeCapabilities(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest, context: Context
    ) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        """Confirms all of the request or nothing."""
        volume_id = limits.volume_id(request.volume_id)
        capabilities = csi.capabilities(request.volume_capabilities)
        context_sent = limits.mapping(request.volume_context, "volume_context")
        sent = limits.mapping(request.parameters, "parameters")
        mutable = limits.mapping(request.mutable_parameters, "mutable_parameters")
        why = await self._reads.read(
            "ValidateVolumeCapabilities",
            request.SerializeToString(deterministic=True),
            lambda: self._provisioner.validate(
                volume_id, capabilities, context_sent, sent, mutable
            ),
            context,
        )
        response = csi_pb2.ValidateVolumeCapabilitiesResponse(message=why)
        if not why:
            response.confirmed.volume_context.update(context_sent)
            response.confirmed.volume_capabilities.extend(request.volume_capabilities)
            response.confirmed.parameters.update(sent)
            response.confirmed.mutable_parameters.update(mutable)
        return response

    async def ControllerExpandVolume(
        self, request: csi_pb2.ControllerExpandVolumeRequest, context: Context
    ) -> csi_pb2.ControllerExpandVolumeResponse:
        """Online and offline, coalesced with other changes; a raw volume needs no NodeExpandVolume."""
        volume_id = limits.volume_id(request.volume_id)
        if not request.HasField("capacity_range"):
            raise limits.MissingField("capacity_range")
        wanted = csi.capacity_range(request.capacity_range)
        given = request.HasField("volume_capability")
        capability = csi.capability(request.volume_capability) if given else None
        change = Change(expansion=Expansion(wanted, capability))
        expanded = (await self._ask(volume_id, change, context)).expanded
        assert expanded is not None, "a requested expansion has an outcome"
        if isinstance(expanded, errors.CrustError):
            raise expanded
        return csi_pb2.ControllerExpandVolumeResponse(
            capacity_bytes=expanded.capacity_bytes,
            node_expansion_required=expanded.node_expansion_required,
        )

    async def ControllerModifyVolume(
        self, request: csi_pb2.ControllerModifyVolumeRequest, context: Context
    ) -> csi_pb2.ControllerModifyVolumeResponse:
        """Atomic, coalesced with other changes; a parameter that is not named keeps its value."""
        volume_id = limits.volume_id(request.volume_id)
        if not request.mutable_parameters:
            raise limits.MissingField("mutable_parameters")
        sent = limits.mapping(request.mutable_parameters, "mutable_parameters")
        change = Change(limits=io_limit_parameters.parse(sent))
        unmodified = (await self._ask(volume_id, change, context)).unmodified
        if unmodified is not None:
            raise unmodified
        return csi_pb2.ControllerModifyVolumeResponse()

    async def _ask(self, volume_id: volumes.VolumeId, change: Change, context: Context) -> Outcome:
        return await self._rules.coalescer.ask(volume_id, change, context.time_remaining())

    def _with_source(
        self, create: Create, key: volumes.VolumeKey
    ) -> contextlib.AbstractContextManager[None]:
        """Lock the source: a volume exclusively; a snapshot, which cannot change, for any number of copies."""
        source = self._key(volumes.VolumeId(create.source.id)) if create.source else key
        # A volume that names itself as its source is not locked twice: the create refuses it.
        if create.source is None or source == key:
            return contextlib.nullcontext()
        if create.source.kind == "snapshot":
            return self._running.shared(source, "CreateVolume")
        return self._running.holding({source}, "CreateVolume")

    def _key(self, volume_id: volumes.VolumeId) -> volumes.VolumeKey:
        return volumes.VolumeKey(self._identity.driver, volume_id)


def _create(request: csi_pb2.CreateVolumeRequest) -> Create:
    name = limits.required(request.name, "name")
    capabilities = csi.capabilities(request.volume_capabilities)
    wanted = csi.capacity_range(request.capacity_range)
    sent = limits.mapping(request.parameters, "parameters")
    source = snapshot_calls.source(request)
    mutable = limits.mapping(request.mutable_parameters, "mutable_parameters")
    first_limits = io_limit_parameters.parse(mutable)
    place = responses.requirement(request.accessibility_requirements)
    return Create(
        name, wanted, capabilities, tuple(sorted(sent.items())), place, source, first_limits
    )


def _attach(request: csi_pb2.ControllerPublishVolumeRequest) -> PublishRequest:
    volume_id = limits.volume_id(request.volume_id)
    node_id = limits.required(request.node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
    if not request.HasField("volume_capability"):
        raise limits.MissingField("volume_capability")
    capability = csi.capability(request.volume_capability)
    limits.mapping(request.volume_context, "volume_context")
    return PublishRequest(volume_id, node_id, capability, request.readonly)
