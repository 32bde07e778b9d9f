"""CSI Controller: decode, call, encode. RPCs that are neither here nor in `snapshots` are UNIMPLEMENTED and not
advertised.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from crust.blockdriver.controller.controller_publish import ControllerPublish
from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.controller.list_volumes import Listed, VolumeLister
from crust.blockdriver.controller.modify_volume import VolumeModifier
from crust.blockdriver.records.health import HealthCheck
from crust.blockdriver.services import messages, roles
from crust.blockdriver.services.roles import NODE_ID_MAX_BYTES
from crust.blockdriver.services.snapshots import SnapshotCalls
from crust.core import errors
from crust.host.process import workers
from crust.rpc.call import Call
from crust.rpc.messages import csi, extensions, requests
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import pool_pb2

_PAGE = 500
"""The volumes of a pool that are read at once."""


@dataclass(frozen=True, slots=True)
class Controller(SnapshotCalls):
    """The services of the controller part: those of CSI, and crust.v1's Pool, for operators, by the same rules."""

    provisioner: Provisioner
    publisher: ControllerPublish
    lister: VolumeLister
    health_check: HealthCheck
    modifier: VolumeModifier

    async def ControllerGetCapabilities(
        self, request: csi_pb2.ControllerGetCapabilitiesRequest, call: Call
    ) -> csi_pb2.ControllerGetCapabilitiesResponse:
        """The capabilities of the CSI profile; crust's extensions only for callers that opt in."""
        types = roles.advertised(
            self.role, with_node_info=extensions.requested(call.metadata, extensions.NODE_INFO)
        )
        response = csi_pb2.ControllerGetCapabilitiesResponse()
        for each in types:
            response.capabilities.add().rpc.type = each
        return response

    async def CreateVolume(
        self, request: csi_pb2.CreateVolumeRequest, call: Call
    ) -> csi_pb2.CreateVolumeResponse:
        """Idempotent by name."""
        create = messages.create(request)
        volume_id, source = self.stores.pool.ids.volume_id(create.name), create.source
        record = await self.calls.change(
            volume_id,
            create,
            lambda: self.provisioner.create(create),
            call,
            also=[source.id] if source and source.kind == "volume" else (),
        )
        return csi_pb2.CreateVolumeResponse(volume=messages.volume(record, self.stores.segment))

    async def DeleteVolume(
        self, request: csi_pb2.DeleteVolumeRequest, call: Call
    ) -> csi_pb2.DeleteVolumeResponse:
        """Idempotent: absent is a success."""
        volume_id = requests.volume_id(request.volume_id)
        await self.calls.change(
            volume_id, None, lambda: workers.run(self.provisioner.delete, volume_id), call
        )
        return csi_pb2.DeleteVolumeResponse()

    async def ControllerPublishVolume(
        self, request: csi_pb2.ControllerPublishVolumeRequest, call: Call
    ) -> csi_pb2.ControllerPublishVolumeResponse:
        """Idempotent by volume and node."""
        attach = messages.controller_publish(request)
        await self.calls.change(
            attach.volume_id, attach, lambda: workers.run(self.publisher.publish, attach), call
        )
        return csi_pb2.ControllerPublishVolumeResponse()

    async def ControllerUnpublishVolume(
        self, request: csi_pb2.ControllerUnpublishVolumeRequest, call: Call
    ) -> csi_pb2.ControllerUnpublishVolumeResponse:
        """Idempotent; without a node id, from all nodes."""
        volume_id = requests.volume_id(request.volume_id)
        node_id = request.node_id
        if node_id:
            requests.required(node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
        await self.calls.change(
            volume_id,
            node_id,
            lambda: workers.run(self.publisher.unpublish, volume_id, node_id),
            call,
        )
        return csi_pb2.ControllerUnpublishVolumeResponse()

    async def ListVolumes(
        self, request: csi_pb2.ListVolumesRequest, call: Call
    ) -> csi_pb2.ListVolumesResponse:
        """Ordered by id, with the nodes that have each volume."""
        wanted = (request.max_entries, request.starting_token)
        page, token = await self.calls.read(wanted, lambda: self.lister.page(*wanted), call)
        response = csi_pb2.ListVolumesResponse(next_token=token)
        for each in page:
            messages.listed(response.entries.add(), each, self.stores.segment, self.role)
        return response

    async def ControllerGetVolume(
        self, request: csi_pb2.ControllerGetVolumeRequest, call: Call
    ) -> csi_pb2.ControllerGetVolumeResponse:
        """One entry of the list."""
        volume_id = requests.volume_id(request.volume_id)
        found = await self.calls.read(volume_id, lambda: self.lister.get(volume_id), call)
        response = csi_pb2.ControllerGetVolumeResponse()
        return messages.listed(response, found, self.stores.segment, self.role)

    async def ControllerListVolumeHealth(
        self, request: csi_pb2.ControllerListVolumeHealthRequest, call: Call
    ) -> csi_pb2.ControllerListVolumeHealthResponse:
        """CSI 1.13. Includes volumes that have only a record or only an image."""
        self.role.require("1.13")
        wanted = (request.max_entries, request.starting_token)
        page, token = await self.calls.read(wanted, lambda: self.lister.health_page(*wanted), call)
        return csi_pb2.ControllerListVolumeHealthResponse(
            entries=[messages.health(each) for each in page], next_token=token
        )

    async def ControllerGetVolumeHealth(
        self, request: csi_pb2.ControllerGetVolumeHealthRequest, call: Call
    ) -> csi_pb2.ControllerGetVolumeHealthResponse:
        """CSI 1.13."""
        self.role.require("1.13")
        volume_id = requests.volume_id(request.volume_id)
        found = await self.calls.read(volume_id, lambda: self.health_check.examine(volume_id), call)
        return csi_pb2.ControllerGetVolumeHealthResponse(volume_health=messages.health(found))

    async def GetCapacity(
        self, request: csi_pb2.GetCapacityRequest, call: Call
    ) -> csi_pb2.GetCapacityResponse:
        """The free capacity for volumes with these capabilities in this topology."""
        asked = messages.capacity_query(request)
        available, largest, smallest = await self.calls.read(
            asked, lambda: self.provisioner.available(asked), call
        )
        response = csi_pb2.GetCapacityResponse(available_capacity=available)
        response.maximum_volume_size.value = largest
        response.minimum_volume_size.value = smallest
        return response

    async def ControllerGetNodeInfo(
        self, request: csi_pb2.ControllerGetNodeInfoRequest, call: Call
    ) -> csi_pb2.ControllerGetNodeInfoResponse:
        """CSI PR #603: NodeGetInfo's answer, and the volumes that have a slot there (specs/node-identity.md)."""
        node_id = requests.required(request.node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
        known = frozenset(
            requests.required(published_volume_id, "published_volume_ids")
            for published_volume_id in request.published_volume_ids
        )
        limit, taken = await self.calls.read(
            (node_id, known), lambda: self.publisher.slots(node_id, known), call
        )
        response = csi_pb2.ControllerGetNodeInfoResponse(
            max_volumes_per_node=limit, published_volume_ids=taken
        )
        for place in messages.places(self.stores.segment):
            response.accessible_topology.CopyFrom(place)
        return response

    async def ValidateVolumeCapabilities(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest, call: Call
    ) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        """Confirms all of the request or nothing."""
        volume_id = requests.volume_id(request.volume_id)
        capabilities = csi.capabilities(request.volume_capabilities)
        context_sent = requests.mapping(request.volume_context, "volume_context")
        sent = requests.mapping(request.parameters, "parameters")
        mutable = requests.mapping(request.mutable_parameters, "mutable_parameters")
        why = await self.calls.read(
            request.SerializeToString(deterministic=True),
            lambda: self.lister.why_not(volume_id, capabilities, context_sent, sent, mutable),
            call,
        )
        response = csi_pb2.ValidateVolumeCapabilitiesResponse(message=why)
        if not why:
            response.confirmed.volume_context.update(context_sent)
            response.confirmed.volume_capabilities.extend(request.volume_capabilities)
            response.confirmed.parameters.update(sent)
            response.confirmed.mutable_parameters.update(mutable)
        return response

    async def ControllerExpandVolume(
        self, request: csi_pb2.ControllerExpandVolumeRequest, call: Call
    ) -> csi_pb2.ControllerExpandVolumeResponse:
        """Online and offline; a raw volume needs no NodeExpandVolume."""
        volume_id, expansion = requests.volume_id(request.volume_id), messages.expansion(request)
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
        """Atomic; a parameter that is not named keeps its value."""
        volume_id, changes = requests.volume_id(request.volume_id), messages.modification(request)
        await self.calls.change(
            volume_id, changes, lambda: self.modifier.modify(volume_id, changes), call
        )
        return csi_pb2.ControllerModifyVolumeResponse()

    async def GetPool(
        self, request: pool_pb2.GetPoolRequest, call: Call
    ) -> pool_pb2.GetPoolResponse:
        """The pool's space now, in bytes: the capacity that CreateVolume decides by."""
        measured = await self.calls.read((), self.stores.capacity.measured, call)
        return pool_pb2.GetPoolResponse(
            **{f"{kind}_bytes": number for kind, number in measured.items()}
        )

    async def ListPoolVolumes(
        self, request: pool_pb2.ListPoolVolumesRequest, call: Call
    ) -> AsyncIterator[pool_pb2.PoolVolume]:
        """The volumes of ListVolumes, read page by page."""
        token = ""
        while True:
            look = partial(self.lister.page, _PAGE, token)
            page, token = await self.calls.read(token, look, call)
            for listed in page:
                yield self._pool_volume(listed)
            if not token:
                return

    def _pool_volume(self, listed: Listed) -> pool_pb2.PoolVolume:
        condition = listed.health.condition
        problems = [condition.message] if condition.abnormal else []
        targets: list[str] = []
        try:
            published = self.stores.node_state.of(listed.volume_id).publishes
            targets = [entry.target for entry in published]
        except errors.Corrupt as error:
            problems.append(error.shown())
        return pool_pb2.PoolVolume(
            volume_id=listed.volume_id,
            name=listed.record.name if listed.record else "",
            capacity_bytes=listed.record.capacity_bytes if listed.record else 0,
            nodes=listed.nodes,
            targets=targets,
            problem="; ".join(problems),
        )
