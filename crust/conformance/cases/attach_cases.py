"""ControllerPublishVolume, ControllerExpandVolume, ControllerModifyVolume (C-161 to C-182)."""

from crust.conformance.case import (
    BLOCK,
    CREATE,
    EXPAND,
    FEW_VOLUMES,
    MODIFY,
    NODE,
    PUBLISH,
    READONLY,
    case,
)
from crust.conformance.co import Co, Code, block, mount
from crust.wire.csi.v1 import csi_pb2

_UNKNOWN = "conformance-no-such-volume"


@case(161, CREATE, PUBLISH, NODE)
def test_attach_needs_a_volume_a_node_and_a_capability(co: Co) -> None:
    """ControllerPublishVolume: INVALID_ARGUMENT without one of them; NOT_FOUND for no such volume or node."""
    volume = co.volume()
    call = co.controller.ControllerPublishVolume
    for field in ("volume_id", "node_id", "volume_capability"):
        request = co.attach_request(volume)
        request.ClearField(field)
        co.refused(call, request, Code.INVALID_ARGUMENT)
    for field in ("volume_id", "node_id"):
        request = co.attach_request(volume)
        setattr(request, field, _UNKNOWN)
        co.refused(call, request, Code.NOT_FOUND)


@case(162, CREATE, PUBLISH, NODE)
def test_attach_and_detach_are_idempotent(co: Co) -> None:
    """ControllerPublishVolume, ControllerUnpublishVolume: OK again, with the same publish_context."""
    volume = co.volume()
    co.attach(volume)
    call = co.controller.ControllerPublishVolume
    first, again = co.ask(call, co.attach_request(volume)), co.ask(call, co.attach_request(volume))
    assert first == again
    co.detach(volume.volume_id)
    co.detach(volume.volume_id)
    co.detach(_UNKNOWN)
    request = csi_pb2.ControllerUnpublishVolumeRequest()
    co.refused(co.controller.ControllerUnpublishVolume, request, Code.INVALID_ARGUMENT)


@case(163, CREATE, PUBLISH, READONLY, NODE)
def test_attach_with_other_readonly_is_already_exists(co: Co) -> None:
    """ControllerPublishVolume: a volume that is on the node with another readonly is ALREADY_EXISTS."""
    volume = co.volume()
    co.attach(volume)
    request = co.attach_request(volume, readonly=True)
    co.refused(co.controller.ControllerPublishVolume, request, Code.ALREADY_EXISTS)


@case(164, CREATE, PUBLISH, NODE)
def test_detach_without_node_id_detaches_from_all_nodes(co: Co) -> None:
    """ControllerUnpublishVolume: without node_id the volume is unpublished from every node."""
    volume = co.volume()
    co.attach(volume)
    request = csi_pb2.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id)
    co.ask(co.controller.ControllerUnpublishVolume, request)
    capability = block() if co.options.parameters.block else co.mount
    # Attached no more, so that it may be attached in another way.
    co.attach(volume, capability)
    co.detach(volume.volume_id)
    co.delete(volume.volume_id)


@case(165, CREATE, PUBLISH, NODE, "parameters.other_node_id")
def test_attach_to_second_node_is_failed_precondition(co: Co) -> None:
    """ControllerPublishVolume: FAILED_PRECONDITION while it is on another node, which the message names."""
    volume = co.volume()
    co.attach(volume)
    request = co.attach_request(volume)
    request.node_id = co.options.parameters.other_node_id
    call = co.controller.ControllerPublishVolume
    message = co.refused(call, request, Code.FAILED_PRECONDITION)
    assert co.node_id() in message


@case(166, CREATE, PUBLISH, NODE, FEW_VOLUMES)
def test_attach_above_max_volumes_is_resource_exhausted(co: Co) -> None:
    """ControllerPublishVolume: RESOURCE_EXHAUSTED at the latest above max_volumes_per_node; OK again when one
    was unpublished.
    """
    info = co.ask(co.node.NodeGetInfo, csi_pb2.NodeGetInfoRequest())
    call, attached = co.controller.ControllerPublishVolume, list[csi_pb2.Volume]()
    for _ in range(info.max_volumes_per_node + 1):
        volume = co.volume()
        co.detach_later(volume.volume_id)
        code, message = co.outcome(call, co.attach_request(volume))
        if code is not Code.OK:
            break
        attached.append(volume)
    assert code is Code.RESOURCE_EXHAUSTED, f"{code.name}: {message}"
    if attached:
        co.ask(call, co.attach_request(attached[-1]))
        co.detach(attached.pop().volume_id)
        co.ask(call, co.attach_request(volume))


@case(167, CREATE, PUBLISH, NODE, BLOCK)
def test_attach_with_other_capability_is_already_exists(co: Co) -> None:
    """ControllerPublishVolume: a volume that is on the node with another capability is ALREADY_EXISTS."""
    volume = co.volume_for(co.mount, block())
    co.attach(volume)
    request = co.attach_request(volume, block())
    co.refused(co.controller.ControllerPublishVolume, request, Code.ALREADY_EXISTS)


@case(171, CREATE, EXPAND)
def test_expand_needs_a_volume_and_a_size(co: Co) -> None:
    """ControllerExpandVolume: INVALID_ARGUMENT without id or capacity_range; NOT_FOUND for no such volume."""
    volume = co.volume()
    size = csi_pb2.CapacityRange(required_bytes=2 * co.options.parameters.size_bytes)
    request = csi_pb2.ControllerExpandVolumeRequest
    call = co.controller.ControllerExpandVolume
    co.refused(call, request(capacity_range=size), Code.INVALID_ARGUMENT)
    co.refused(call, request(volume_id=volume.volume_id), Code.INVALID_ARGUMENT)
    unknown = request(volume_id=_UNKNOWN, capacity_range=size)
    co.refused(call, unknown, Code.NOT_FOUND)


@case(172, CREATE, EXPAND)
def test_a_volume_grows_and_never_shrinks(co: Co) -> None:
    """ControllerExpandVolume: at least what is required, OK again, and OK for less than there is."""
    volume = co.volume()
    size = 2 * (volume.capacity_bytes or co.options.parameters.size_bytes)
    assert _expand(co, volume, size).capacity_bytes >= size
    assert _expand(co, volume, size).capacity_bytes >= size
    assert _expand(co, volume, 1).capacity_bytes >= size


@case(173, CREATE, EXPAND)
def test_expand_beyond_limits_is_out_of_range(co: Co) -> None:
    """ControllerExpandVolume: an exabyte, or above limit_bytes, is OUT_OF_RANGE (or RESOURCE_EXHAUSTED)."""
    volume = co.volume()
    request = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id,
        capacity_range=csi_pb2.CapacityRange(required_bytes=1 << 60),
        volume_capability=co.mount,
    )
    call = co.controller.ControllerExpandVolume
    co.refused(call, request, Code.OUT_OF_RANGE, Code.RESOURCE_EXHAUSTED)
    request.capacity_range.CopyFrom(csi_pb2.CapacityRange(required_bytes=1, limit_bytes=2))
    co.refused(call, request, Code.OUT_OF_RANGE)


@case(174, CREATE, EXPAND, BLOCK)
def test_a_raw_volume_needs_no_expansion_on_the_node(co: Co) -> None:
    """ControllerExpandVolume: node_expansion_required is false for a raw block volume."""
    volume = co.volume(block())
    size = 2 * (volume.capacity_bytes or co.options.parameters.size_bytes)
    assert not _expand(co, volume, size, block()).node_expansion_required


@case(175, CREATE, EXPAND)
def test_expand_with_unsupported_capability_is_invalid(co: Co) -> None:
    """ControllerExpandVolume: a capability that the volume cannot have is INVALID_ARGUMENT, and it does not
    grow.
    """
    volume = co.volume()
    size = 2 * (volume.capacity_bytes or co.options.parameters.size_bytes)
    request = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id,
        capacity_range=csi_pb2.CapacityRange(required_bytes=size),
        volume_capability=mount("crust-conformance-fs"),
    )
    co.refused(co.controller.ControllerExpandVolume, request, Code.INVALID_ARGUMENT)
    assert _expand(co, volume, 1).capacity_bytes < size


@case(176, CREATE, EXPAND, NODE, "plugin.OFFLINE")
def test_offline_expand_of_published_volume_is_failed_precondition(co: Co) -> None:
    """ControllerExpandVolume where expansion is OFFLINE: FAILED_PRECONDITION while the volume is published."""
    volume = co.volume()
    co.use(volume)
    request = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id,
        capacity_range=csi_pb2.CapacityRange(
            required_bytes=2 * (volume.capacity_bytes or co.options.parameters.size_bytes)
        ),
        volume_capability=co.mount,
    )
    co.refused(co.controller.ControllerExpandVolume, request, Code.FAILED_PRECONDITION)


@case(181, CREATE, MODIFY)
def test_modify_needs_a_volume(co: Co) -> None:
    """ControllerModifyVolume: INVALID_ARGUMENT without an id, NOT_FOUND for no such volume."""
    request = csi_pb2.ControllerModifyVolumeRequest
    parameters = co.options.parameters.mutable_parameters or {"crust-conformance": "1"}
    call = co.controller.ControllerModifyVolume
    co.refused(call, request(mutable_parameters=parameters), Code.INVALID_ARGUMENT)
    if co.options.parameters.mutable_parameters:
        unknown = request(volume_id=_UNKNOWN, mutable_parameters=parameters)
        co.refused(call, unknown, Code.NOT_FOUND)


@case(182, CREATE, MODIFY, "parameters.mutable_parameters")
def test_modify_is_idempotent_and_refuses_unknown_keys(co: Co) -> None:
    """ControllerModifyVolume: OK again; a key that is not known is INVALID_ARGUMENT, alone and among known
    ones.
    """
    volume = co.volume()
    request = csi_pb2.ControllerModifyVolumeRequest(
        volume_id=volume.volume_id, mutable_parameters=co.options.parameters.mutable_parameters
    )
    call = co.controller.ControllerModifyVolume
    co.ask(call, request)
    co.ask(call, request)
    request.mutable_parameters["crust-conformance-unknown"] = "1"
    co.refused(call, request, Code.INVALID_ARGUMENT)


def _expand(
    co: Co,
    volume: csi_pb2.Volume,
    size_bytes: int,
    capability: csi_pb2.VolumeCapability | None = None,
) -> csi_pb2.ControllerExpandVolumeResponse:
    request = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id,
        capacity_range=csi_pb2.CapacityRange(required_bytes=size_bytes),
        volume_capability=capability or co.mount,
        secrets=co.options.parameters.secrets,
    )
    return co.ask(co.controller.ControllerExpandVolume, request)
