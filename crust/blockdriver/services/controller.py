"""CSI Controller: decode, call, encode. RPCs that are not here are UNIMPLEMENTED and not advertised."""

import contextlib
from dataclasses import dataclass

from crust.blockdriver.controller.capacity import CapacityReport
from crust.blockdriver.controller.controller_publish import ControllerPublish
from crust.blockdriver.controller.create_volume import Provisioner, Volume
from crust.blockdriver.controller.list_volumes import Validation, VolumeLister
from crust.blockdriver.controller.modify_volume import (
    Change,
    InterruptedChanges,
    Outcome,
    VolumeModifier,
)
from crust.blockdriver.records.health import HealthCheck
from crust.blockdriver.services import messages, roles
from crust.blockdriver.services.deadlines import Calls
from crust.blockdriver.services.roles import NODE_ID_MAX_BYTES, NodeIdentity
from crust.blockdriver.services.snapshots import SnapshotCalls
from crust.core import errors, volumes
from crust.rpc.call import Call
from crust.rpc.messages import csi, extensions, limits
from crust.wire.csi.v1 import csi_pb2


@dataclass(frozen=True, slots=True)
class ControllerRules:
    """The rules of the controller part; tests call them without a server."""

    provisioner: Provisioner
    publisher: ControllerPublish
    lister: VolumeLister
    health_check: HealthCheck
    capacity_report: CapacityReport
    validation: Validation
    modifier: VolumeModifier
    interrupted_changes: InterruptedChanges


class Controller:
    """The Controller service."""

    def __init__(
        self, identity: NodeIdentity, rules: ControllerRules, snapshots: SnapshotCalls, calls: Calls
    ) -> None:
        self._identity = identity
        self._rules = rules
        self._calls = calls
        # those of groups are calls of another service
        self.CreateSnapshot, self.DeleteSnapshot = snapshots.create, snapshots.delete
        self.ListSnapshots, self.GetSnapshot = snapshots.list, snapshots.get

    async def ControllerGetCapabilities(
        self, request: csi_pb2.ControllerGetCapabilitiesRequest, call: Call
    ) -> csi_pb2.ControllerGetCapabilitiesResponse:
        """The capabilities of the CSI profile; crust's extensions only for callers that opt in."""
        types = roles.advertised(
            self._identity, with_node_info=extensions.requested(call, extensions.NODE_INFO)
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
        volume_id = self._rules.provisioner.pool.ids.volume_id(create.name)
        source_id = create.source.id if create.source else volume_id
        is_snapshot = create.source is not None and create.source.kind == "snapshot"

        async def work() -> Volume:
            # A snapshot cannot change: any number of copies share it. (The volume's own id is none: NOT_FOUND.)
            is_shared = is_snapshot and source_id != volume_id
            with (
                self._calls.shared(source_id, "CreateVolume")
                if is_shared
                else contextlib.nullcontext()
            ):
                return await self._rules.provisioner.create(create)

        also = [] if is_snapshot else [source_id]
        volume = await self._calls.change("CreateVolume", volume_id, create, work, call, also=also)
        return csi_pb2.CreateVolumeResponse(volume=messages.volume(volume, self._identity.segment))

    async def DeleteVolume(
        self, request: csi_pb2.DeleteVolumeRequest, call: Call
    ) -> csi_pb2.DeleteVolumeResponse:
        """Idempotent: absent is a success."""
        volume_id = limits.volume_id(request.volume_id)
        await self._calls.change(
            "DeleteVolume",
            volume_id,
            None,
            lambda: self._rules.provisioner.delete(volume_id),
            call,
        )
        return csi_pb2.DeleteVolumeResponse()

    async def ControllerPublishVolume(
        self, request: csi_pb2.ControllerPublishVolumeRequest, call: Call
    ) -> csi_pb2.ControllerPublishVolumeResponse:
        """Idempotent by volume and node."""
        attach = messages.controller_publish(request)
        await self._calls.change(
            "ControllerPublishVolume",
            attach.volume_id,
            attach,
            lambda: self._rules.publisher.publish(attach),
            call,
        )
        return csi_pb2.ControllerPublishVolumeResponse()

    async def ControllerUnpublishVolume(
        self, request: csi_pb2.ControllerUnpublishVolumeRequest, call: Call
    ) -> csi_pb2.ControllerUnpublishVolumeResponse:
        """Idempotent; without a node id, from all nodes."""
        volume_id = limits.volume_id(request.volume_id)
        node_id = limits.optional(request.node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
        await self._calls.change(
            "ControllerUnpublishVolume",
            volume_id,
            node_id,
            lambda: self._rules.publisher.unpublish(volume_id, node_id),
            call,
        )
        return csi_pb2.ControllerUnpublishVolumeResponse()

    async def ListVolumes(
        self, request: csi_pb2.ListVolumesRequest, call: Call
    ) -> csi_pb2.ListVolumesResponse:
        """Ordered by id, with the nodes that have each volume."""
        wanted = (request.max_entries, request.starting_token)
        page, token = await self._calls.read(
            "ListVolumes", wanted, lambda: self._rules.lister.page(*wanted), call
        )
        response = csi_pb2.ListVolumesResponse(next_token=token)
        for each in page:
            messages.listed(response.entries.add(), each, self._identity)
        return response

    async def ControllerGetVolume(
        self, request: csi_pb2.ControllerGetVolumeRequest, call: Call
    ) -> csi_pb2.ControllerGetVolumeResponse:
        """One entry of the list."""
        volume_id = limits.volume_id(request.volume_id)
        found = await self._calls.read(
            "ControllerGetVolume", volume_id, lambda: self._rules.lister.get(volume_id), call
        )
        return messages.listed(csi_pb2.ControllerGetVolumeResponse(), found, self._identity)

    async def ControllerListVolumeHealth(
        self, request: csi_pb2.ControllerListVolumeHealthRequest, call: Call
    ) -> csi_pb2.ControllerListVolumeHealthResponse:
        """CSI 1.13. Includes volumes that have only a record or only an image."""
        self._identity.require("1.13")
        wanted = (request.max_entries, request.starting_token)
        page, token = await self._calls.read(
            "ControllerListVolumeHealth",
            wanted,
            lambda: self._rules.lister.health_page(*wanted),
            call,
        )
        return csi_pb2.ControllerListVolumeHealthResponse(
            entries=[messages.health(each) for each in page], next_token=token
        )

    async def ControllerGetVolumeHealth(
        self, request: csi_pb2.ControllerGetVolumeHealthRequest, call: Call
    ) -> csi_pb2.ControllerGetVolumeHealthResponse:
        """CSI 1.13."""
        self._identity.require("1.13")
        volume_id = limits.volume_id(request.volume_id)
        found = await self._calls.read(
            "ControllerGetVolumeHealth",
            volume_id,
            lambda: self._rules.health_check.examine(volume_id),
            call,
        )
        return csi_pb2.ControllerGetVolumeHealthResponse(volume_health=messages.health(found))

    async def GetCapacity(
        self, request: csi_pb2.GetCapacityRequest, call: Call
    ) -> csi_pb2.GetCapacityResponse:
        """The free capacity for volumes with these capabilities in this topology."""
        asked = messages.capacity_query(request)
        available = await self._calls.read(
            "GetCapacity", asked, lambda: self._rules.capacity_report.available(asked), call
        )
        response = csi_pb2.GetCapacityResponse(available_capacity=available.available_bytes)
        response.maximum_volume_size.value = available.maximum_bytes
        response.minimum_volume_size.value = available.minimum_bytes
        return response

    async def ControllerGetNodeInfo(
        self, request: csi_pb2.ControllerGetNodeInfoRequest, call: Call
    ) -> csi_pb2.ControllerGetNodeInfoResponse:
        """CSI PR #603: NodeGetInfo's answer, and the volumes that have a slot there (specs/node-identity.md)."""
        node_id = limits.required(request.node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
        known = frozenset(
            limits.required(each, "published_volume_ids") for each in request.published_volume_ids
        )
        slots = await self._calls.read(
            "ControllerGetNodeInfo",
            (node_id, known),
            lambda: self._rules.publisher.slots(node_id, known),
            call,
        )
        response = csi_pb2.ControllerGetNodeInfoResponse(
            max_volumes_per_node=slots.limit, published_volume_ids=slots.taken
        )
        for place in messages.places(self._identity.segment):
            response.accessible_topology.CopyFrom(place)
        return response

    async def ValidateVolumeCapabilities(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest, call: Call
    ) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        """Confirms all of the request or nothing."""
        volume_id = limits.volume_id(request.volume_id)
        capabilities = csi.capabilities(request.volume_capabilities)
        context_sent = limits.mapping(request.volume_context, "volume_context")
        sent = limits.mapping(request.parameters, "parameters")
        mutable = limits.mapping(request.mutable_parameters, "mutable_parameters")
        why = await self._calls.read(
            "ValidateVolumeCapabilities",
            request.SerializeToString(deterministic=True),
            lambda: self._rules.validation.why_not(
                volume_id, capabilities, context_sent, sent, mutable
            ),
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
        volume_id = limits.volume_id(request.volume_id)
        change = messages.expansion(request)
        expanded = (await self._change("ControllerExpandVolume", volume_id, change, call)).expanded
        assert expanded is not None, "a requested expansion has an outcome"
        if isinstance(expanded, errors.CrustError):
            raise expanded
        return csi_pb2.ControllerExpandVolumeResponse(
            capacity_bytes=expanded.capacity_bytes,
            node_expansion_required=expanded.node_expansion_required,
        )

    async def ControllerModifyVolume(
        self, request: csi_pb2.ControllerModifyVolumeRequest, call: Call
    ) -> csi_pb2.ControllerModifyVolumeResponse:
        """Atomic; a parameter that is not named keeps its value."""
        volume_id = limits.volume_id(request.volume_id)
        change = messages.modification(request)
        outcome = await self._change("ControllerModifyVolume", volume_id, change, call)
        if outcome.unmodified is not None:
            raise outcome.unmodified
        return csi_pb2.ControllerModifyVolumeResponse()

    async def _change(
        self, rpc: str, volume_id: volumes.VolumeId, change: Change, call: Call
    ) -> Outcome:
        return await self._calls.change(
            rpc,
            volume_id,
            change,
            lambda: self._rules.modifier.apply(volume_id, change),
            call,
        )
