"""CSI Controller: decode, call, encode. An RPC without a method here or in `snapshots` is UNIMPLEMENTED."""

from dataclasses import dataclass
from functools import partial

from crust.blockdriver.controller import class_parameters, controller_publish, topology
from crust.blockdriver.controller.create_volume import Create, Provisioner
from crust.blockdriver.controller.list_volumes import Listed, VolumeLister
from crust.blockdriver.controller.modify_volume import VolumeModifier
from crust.blockdriver.records.health import HealthCheck
from crust.blockdriver.records.models import VolumeRecord
from crust.blockdriver.services.calls import health
from crust.blockdriver.services.roles import NODE_ID_MAX_BYTES
from crust.blockdriver.services.snapshots import SnapshotCalls, is_met
from crust.blockdriver.snapshots import content_source
from crust.host.process import workers
from crust.rpc.call import Call
from crust.rpc.messages import csi, extensions
from crust.wire.csi.v1 import csi_pb2

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
_NOT_IN_SHARED_POOL = frozenset(
    {
        _Rpc.PUBLISH_UNPUBLISH_VOLUME,
        _Rpc.PUBLISH_READONLY,
        _Rpc.LIST_VOLUMES_PUBLISHED_NODES,
        _Rpc.GET_NODE_INFO,
    }
)
_NOT_IN_NODE_DEPLOYMENT = _NOT_IN_SHARED_POOL | {_Rpc.EXPAND_VOLUME, _Rpc.MODIFY_VOLUME}
_HEALTH = {
    "1.12": (_Rpc.VOLUME_CONDITION,),
    "1.13": (_Rpc.GET_VOLUME_HEALTH, _Rpc.LIST_VOLUME_HEALTH),
}


@dataclass(frozen=True, slots=True)
class Controller(SnapshotCalls):
    provisioner: Provisioner
    lister: VolumeLister
    health_check: HealthCheck
    modifier: VolumeModifier

    async def ControllerGetCapabilities(
        self, request: csi_pb2.ControllerGetCapabilitiesRequest, call: Call
    ) -> csi_pb2.ControllerGetCapabilitiesResponse:
        """The capabilities of the CSI profile; crust's extensions only for callers that opt in."""
        types = [*_CAPABILITIES, *_HEALTH[self.role.csi_profile]]
        if extensions.requested(call.metadata, extensions.NODE_INFO):
            types.append(_Rpc.GET_NODE_INFO)
        absent = _NOT_IN_NODE_DEPLOYMENT if self.role.node_deployment else frozenset()
        if self.role.is_shared:
            absent |= _NOT_IN_SHARED_POOL
        response = csi_pb2.ControllerGetCapabilitiesResponse()
        for capability in types:
            if capability not in absent:
                response.capabilities.add().rpc.type = capability
        return response

    async def CreateVolume(
        self, request: csi_pb2.CreateVolumeRequest, call: Call
    ) -> csi_pb2.CreateVolumeResponse:
        is_accessible, source = True, None
        if request.HasField("volume_content_source"):
            pb = request.volume_content_source
            source_kind = pb.WhichOneof("type")
            if source_kind is None:
                raise csi.MissingField("volume_content_source.type")
            if source_kind == "snapshot":
                source_id = csi.required(pb.snapshot.snapshot_id, "snapshot_id")
            else:
                source_id = csi.required(pb.volume.volume_id, "volume_id")
            source = content_source.SourceRequest(source_kind, source_id)
        if request.HasField("accessibility_requirements"):
            required = request.accessibility_requirements
            is_accessible = is_met(required, self.stores.segment)
        create = Create(
            csi.required(request.name, "name"),
            csi.capacity_range(request.capacity_range),
            csi.capabilities(request.volume_capabilities),
            tuple(sorted(csi.mapping(request.parameters, "parameters").items())),
            is_accessible,
            source,
            class_parameters.parse_mutable(
                csi.mapping(request.mutable_parameters, "mutable_parameters")
            ),
        )
        volume_id = self.stores.pool.ids.volume_id(create.name)
        record = await self.calls.change(
            volume_id,
            create,
            lambda: self.provisioner.create(create),
            call,
            also=[source.id] if source and source.kind == "volume" else (),
        )
        return csi_pb2.CreateVolumeResponse(volume=self._volume(record))

    async def DeleteVolume(
        self, request: csi_pb2.DeleteVolumeRequest, call: Call
    ) -> csi_pb2.DeleteVolumeResponse:
        volume_id = csi.volume_id(request.volume_id)
        await self.calls.change(
            volume_id, None, lambda: workers.run(self.provisioner.delete, volume_id), call
        )
        return csi_pb2.DeleteVolumeResponse()

    async def ControllerPublishVolume(
        self, request: csi_pb2.ControllerPublishVolumeRequest, call: Call
    ) -> csi_pb2.ControllerPublishVolumeResponse:
        volume_id = csi.volume_id(request.volume_id)
        node_id = csi.required(request.node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
        if not request.HasField("volume_capability"):
            raise csi.MissingField("volume_capability")
        capability = csi.capability(request.volume_capability)
        csi.mapping(request.volume_context, "volume_context")
        publish = partial(
            controller_publish.publish_to_node,
            self.stores,
            volume_id,
            node_id,
            capability,
            readonly=request.readonly,
        )
        arguments = node_id, capability, request.readonly
        await self.calls.change(volume_id, arguments, lambda: workers.run(publish), call)
        return csi_pb2.ControllerPublishVolumeResponse()

    async def ControllerUnpublishVolume(
        self, request: csi_pb2.ControllerUnpublishVolumeRequest, call: Call
    ) -> csi_pb2.ControllerUnpublishVolumeResponse:
        """Idempotent; without a node id, from all nodes."""
        volume_id = csi.volume_id(request.volume_id)
        node_id = request.node_id
        if node_id:
            csi.required(node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
        unpublish = partial(controller_publish.unpublish_from_node, self.stores, volume_id, node_id)
        await self.calls.change(volume_id, node_id, lambda: workers.run(unpublish), call)
        return csi_pb2.ControllerUnpublishVolumeResponse()

    async def ListVolumes(
        self, request: csi_pb2.ListVolumesRequest, call: Call
    ) -> csi_pb2.ListVolumesResponse:
        """Ordered by id, with the nodes that have each volume."""
        query = (request.max_entries, request.starting_token)
        page, token = await self.calls.read(query, lambda: self.lister.page(*query), call)
        response = csi_pb2.ListVolumesResponse(next_token=token)
        for volume in page:
            self._fill(response.entries.add(), volume)
        return response

    async def ControllerGetVolume(
        self, request: csi_pb2.ControllerGetVolumeRequest, call: Call
    ) -> csi_pb2.ControllerGetVolumeResponse:
        volume_id = csi.volume_id(request.volume_id)
        listed = await self.calls.read(volume_id, lambda: self.lister.get(volume_id), call)
        response = csi_pb2.ControllerGetVolumeResponse()
        self._fill(response, listed)
        return response

    async def ControllerListVolumeHealth(
        self, request: csi_pb2.ControllerListVolumeHealthRequest, call: Call
    ) -> csi_pb2.ControllerListVolumeHealthResponse:
        """CSI 1.13. Includes volumes that have only a record or only an image."""
        self.role.require("1.13")
        query = (request.max_entries, request.starting_token)
        page, token = await self.calls.read(query, lambda: self.lister.health_page(*query), call)
        return csi_pb2.ControllerListVolumeHealthResponse(
            entries=[health(entry) for entry in page], next_token=token
        )

    async def ControllerGetVolumeHealth(
        self, request: csi_pb2.ControllerGetVolumeHealthRequest, call: Call
    ) -> csi_pb2.ControllerGetVolumeHealthResponse:
        self.role.require("1.13")
        volume_id = csi.volume_id(request.volume_id)
        volume_health = await self.calls.read(
            volume_id, lambda: self.health_check.examine(volume_id), call
        )
        return csi_pb2.ControllerGetVolumeHealthResponse(volume_health=health(volume_health))

    async def GetCapacity(
        self, request: csi_pb2.GetCapacityRequest, call: Call
    ) -> csi_pb2.GetCapacityResponse:
        place = request.accessible_topology.segments
        query = (
            tuple(csi.capability(capability) for capability in request.volume_capabilities),
            tuple(sorted(csi.mapping(request.parameters, "parameters").items())),
            topology.segments(csi.mapping(place, "segments")) if place else (),
        )
        available, largest, smallest = await self.calls.read(
            query, lambda: self.provisioner.available(*query), call
        )
        response = csi_pb2.GetCapacityResponse(available_capacity=available)
        response.maximum_volume_size.value = largest
        response.minimum_volume_size.value = smallest
        return response

    async def ControllerGetNodeInfo(
        self, request: csi_pb2.ControllerGetNodeInfoRequest, call: Call
    ) -> csi_pb2.ControllerGetNodeInfoResponse:
        """CSI PR #603: NodeGetInfo's answer, and the volumes that have a slot there (specs/node-identity.md)."""
        node_id = csi.required(request.node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
        ids = frozenset(
            csi.required(published_volume_id, "published_volume_ids")
            for published_volume_id in request.published_volume_ids
        )
        limit, occupied = await self.calls.read(
            (node_id, ids), lambda: self.stores.attach_slots.in_use(node_id, ids), call
        )
        response = csi_pb2.ControllerGetNodeInfoResponse(
            max_volumes_per_node=limit, published_volume_ids=occupied
        )
        for place in self.calls.places:
            response.accessible_topology.CopyFrom(place)
        return response

    async def ValidateVolumeCapabilities(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest, call: Call
    ) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        """Confirms the complete request, or no part of it."""
        volume_id = csi.volume_id(request.volume_id)
        capabilities = csi.capabilities(request.volume_capabilities)
        context_sent = csi.mapping(request.volume_context, "volume_context")
        sent = csi.mapping(request.parameters, "parameters")
        mutable = csi.mapping(request.mutable_parameters, "mutable_parameters")
        obstacle = await self.calls.read(
            request.SerializeToString(deterministic=True),
            lambda: self.lister.why_not(volume_id, capabilities, context_sent, sent, mutable),
            call,
        )
        response = csi_pb2.ValidateVolumeCapabilitiesResponse(message=obstacle)
        if not obstacle:
            response.confirmed.volume_context.update(context_sent)
            response.confirmed.volume_capabilities.extend(request.volume_capabilities)
            response.confirmed.parameters.update(sent)
            response.confirmed.mutable_parameters.update(mutable)
        return response

    async def ControllerExpandVolume(
        self, request: csi_pb2.ControllerExpandVolumeRequest, call: Call
    ) -> csi_pb2.ControllerExpandVolumeResponse:
        """Online and offline; a raw volume needs no NodeExpandVolume."""
        volume_id = csi.volume_id(request.volume_id)
        if not request.HasField("capacity_range"):
            raise csi.MissingField("capacity_range")
        expansion = (
            csi.capacity_range(request.capacity_range),
            csi.capability(request.volume_capability)
            if request.HasField("volume_capability")
            else None,
        )
        size_bytes, needs_node = await self.calls.change(
            volume_id,
            expansion,
            lambda: workers.run(self.modifier.expand, volume_id, *expansion),
            call,
        )
        return csi_pb2.ControllerExpandVolumeResponse(
            capacity_bytes=size_bytes, node_expansion_required=needs_node
        )

    async def ControllerModifyVolume(
        self, request: csi_pb2.ControllerModifyVolumeRequest, call: Call
    ) -> csi_pb2.ControllerModifyVolumeResponse:
        """Atomic; a parameter that the request omits keeps its value."""
        volume_id = csi.volume_id(request.volume_id)
        if not request.mutable_parameters:
            raise csi.MissingField("mutable_parameters")
        sent = csi.mapping(request.mutable_parameters, "mutable_parameters")
        changes = class_parameters.parse_mutable(sent)
        await self.calls.change(
            volume_id, changes, lambda: self.modifier.modify(volume_id, changes), call
        )
        return csi_pb2.ControllerModifyVolumeResponse()

    def _volume(self, record: VolumeRecord) -> csi_pb2.Volume:
        pb = csi_pb2.Volume(
            volume_id=record.volume_id,
            capacity_bytes=record.capacity_bytes,
            volume_context=class_parameters.volume_context(record.parameters),
            accessible_topology=self.calls.places,
        )
        source = record.content_source
        if source is not None and source.kind == "snapshot":
            pb.content_source.snapshot.snapshot_id = source.id
        elif source is not None:
            pb.content_source.volume.volume_id = source.id
        return pb

    def _fill(
        self,
        pb: csi_pb2.ListVolumesResponse.Entry | csi_pb2.ControllerGetVolumeResponse,
        listed: Listed,
    ) -> None:
        """Fill an entry of ListVolumes, or ControllerGetVolume's answer; without a readable record its size is 0."""
        if listed.record is None:
            pb.volume.volume_id = listed.volume_id
            pb.volume.accessible_topology.extend(self.calls.places)
        else:
            pb.volume.CopyFrom(self._volume(listed.record))
        pb.status.published_node_ids.extend(listed.nodes)
        if self.role.csi_profile == "1.12":
            condition = csi.condition_to_wire(listed.health.condition)
            pb.status.volume_condition.CopyFrom(condition)
