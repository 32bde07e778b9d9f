"""ControllerPublishVolume, ControllerExpandVolume, ControllerModifyVolume (C-161 to C-182)."""

from crust.conformance.calls import Code
from crust.conformance.case import (
    BLOCK,
    CHECKS_FS_TYPE,
    CREATE,
    EXPAND,
    FEW_VOLUMES,
    MODIFY,
    NODE,
    PUBLISH,
    READONLY,
    beyond,
    case,
    must,
    should,
)
from crust.conformance.co import Co
from crust.conformance.volume_capabilities import NO_FILESYSTEM, block, mount
from crust.wire.csi.v1 import csi_pb2

_UNKNOWN = "conformance-no-such-volume"


@case(161, CREATE, PUBLISH, NODE)
@must(
    "ControllerPublishVolume Errors",
    "a volume or a node that does not exist MUST be NOT_FOUND; volume_id, node_id and "
    "volume_capability are REQUIRED",
)
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
@must(
    "ControllerPublishVolume, ControllerUnpublishVolume",
    "idempotent: MUST reply OK; publish_context SHALL NOT be mutable; volume_id is REQUIRED",
)
@should(
    "ControllerUnpublishVolume",
    "a volume that cannot be found and can be regarded as unpublished SHOULD be OK",
)
def test_attach_and_detach_are_idempotent(co: Co) -> None:
    """ControllerPublishVolume, ControllerUnpublishVolume: OK again, with the same publish_context; a volume that is
    not there is OK, too.
    """
    volume = co.volume()
    co.attach(volume)
    call = co.controller.ControllerPublishVolume
    first, again = co.ask(call, co.attach_request(volume)), co.ask(call, co.attach_request(volume))
    assert first.publish_context == again.publish_context
    co.detach(volume.volume_id)
    co.detach(volume.volume_id)
    with co.should():
        co.detach(_UNKNOWN)
    request = csi_pb2.ControllerUnpublishVolumeRequest()
    co.refused(co.controller.ControllerUnpublishVolume, request, Code.INVALID_ARGUMENT)


@case(163, CREATE, PUBLISH, READONLY, NODE)
@must(
    "ControllerPublishVolume Errors",
    "published at the node but incompatible with readonly MUST be ALREADY_EXISTS",
)
def test_attach_with_other_readonly_is_already_exists(co: Co) -> None:
    """ControllerPublishVolume: a volume that is on the node with another readonly is ALREADY_EXISTS."""
    volume = co.volume()
    co.attach(volume)
    request = co.attach_request(volume, readonly=True)
    co.refused(co.controller.ControllerPublishVolume, request, Code.ALREADY_EXISTS)


@case(164, CREATE, PUBLISH, NODE)
@must(
    "ControllerUnpublishVolume",
    "without node_id the SP MUST unpublish the volume from all nodes",
)
def test_detach_without_node_id_detaches_from_all_nodes(co: Co) -> None:
    """ControllerUnpublishVolume: without node_id the volume is unpublished from every node."""
    volume = co.volume()
    co.attach(volume)
    request = csi_pb2.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id)
    co.ask(co.controller.ControllerUnpublishVolume, request)
    # Attached no more, so that it may be attached in another way.
    co.attach(volume, readonly=READONLY in co.has)
    co.detach(volume.volume_id)
    co.delete(volume.volume_id)


@case(165, CREATE, PUBLISH, NODE, "parameters.other_node_id")
@must(
    "ControllerPublishVolume Errors",
    "published at another node, without a MULTI_NODE capability, MUST be FAILED_PRECONDITION",
)
@should(
    "ControllerPublishVolume Errors",
    "the plugin SHOULD specify the other node_id in the message",
)
def test_attach_to_second_node_is_failed_precondition(co: Co) -> None:
    """ControllerPublishVolume: FAILED_PRECONDITION while it is on another node, which the message names."""
    volume = co.volume()
    co.attach(volume)
    request = co.attach_request(volume)
    request.node_id = co.options.parameters.other_node_id
    call = co.controller.ControllerPublishVolume
    message = co.refused(call, request, Code.FAILED_PRECONDITION)
    with co.should():
        assert co.node_id() in message, "the message does not name the other node"


@case(166, CREATE, PUBLISH, NODE, FEW_VOLUMES)
@must(
    "ControllerPublishVolume Errors",
    "the maximum number of volumes at the node MUST be RESOURCE_EXHAUSTED, until one is detached",
)
@beyond(
    "NodeGetInfo",
    "max_volumes_per_node is the maximum that the controller can publish; a CO keeps to it "
    "by itself",
)
def test_attach_above_max_volumes_is_resource_exhausted(co: Co) -> None:
    """ControllerPublishVolume: no more than max_volumes_per_node; a refusal is RESOURCE_EXHAUSTED, and OK again
    when one was unpublished.
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
    with co.beyond():
        assert code is not Code.OK, f"more than {info.max_volumes_per_node} volumes are attached"
    assert code in (Code.OK, Code.RESOURCE_EXHAUSTED), f"{code.name}: {message}"
    if attached and code is not Code.OK:
        co.ask(call, co.attach_request(attached[-1]))
        co.detach(attached.pop().volume_id)
        co.ask(call, co.attach_request(volume))


@case(167, CREATE, PUBLISH, NODE, BLOCK)
@beyond(
    "ControllerPublishVolume Errors",
    "incompatible with volume_capability is ALREADY_EXISTS; a plugin that attaches alike "
    "for all finds it compatible",
)
def test_attach_with_other_capability_is_already_exists(co: Co) -> None:
    """ControllerPublishVolume: a volume that is on the node with another capability is ALREADY_EXISTS."""
    volume = co.volume_for(co.mount, block())
    co.attach(volume)
    request = co.attach_request(volume, block())
    co.refused(co.controller.ControllerPublishVolume, request, Code.ALREADY_EXISTS)


@case(171, CREATE, EXPAND)
@must(
    "ControllerExpandVolume Errors",
    "a volume that does not exist MUST be NOT_FOUND; volume_id and capacity_range are REQUIRED",
)
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
@must(
    "ControllerExpandVolume",
    "this operation MUST be idempotent; the volume MUST be at least required_bytes",
)
@should("ControllerExpandVolume", "a volume that is larger than the target already SHOULD be OK")
def test_a_volume_grows_and_never_shrinks(co: Co) -> None:
    """ControllerExpandVolume: at least what is required, OK again, and OK for less than there is."""
    volume = co.volume()
    size = 2 * (volume.capacity_bytes or co.options.parameters.size_bytes)
    assert _expand(co, volume, size).capacity_bytes >= size
    assert _expand(co, volume, size).capacity_bytes >= size
    smaller = size
    with co.should():
        smaller = _expand(co, volume, 1).capacity_bytes
    assert smaller >= size, "the volume has shrunk"


@case(173, CREATE, EXPAND)
@must(
    "ControllerExpandVolume Errors",
    "a capacity_range that is not allowed MUST be OUT_OF_RANGE; the volume MUST be at least "
    "required_bytes",
)
@beyond(
    "CapacityRange",
    "a limit_bytes below the volume's size is not allowed; but a larger volume SHOULD be OK",
)
def test_expand_beyond_limits_is_out_of_range(co: Co) -> None:
    """ControllerExpandVolume: an exabyte is OUT_OF_RANGE (or RESOURCE_EXHAUSTED), or the volume has it; above
    limit_bytes is OUT_OF_RANGE.
    """
    volume = co.volume()
    request = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id,
        capacity_range=csi_pb2.CapacityRange(required_bytes=1 << 60),
        volume_capability=co.mount,
    )
    call = co.controller.ControllerExpandVolume
    code, message = co.outcome(call, request)
    assert code in (Code.OK, Code.OUT_OF_RANGE, Code.RESOURCE_EXHAUSTED), f"{code.name}: {message}"
    if code is Code.OK:  # a volume without a size of its own
        assert co.ask(call, request).capacity_bytes >= request.capacity_range.required_bytes
    request.capacity_range.CopyFrom(csi_pb2.CapacityRange(required_bytes=1, limit_bytes=2))
    with co.beyond():
        co.refused(call, request, Code.OUT_OF_RANGE)


@case(174, CREATE, EXPAND, BLOCK)
@beyond(
    "ControllerExpandVolume",
    "for a block device the SP MAY set node_expansion_required to false",
)
def test_a_raw_volume_needs_no_expansion_on_the_node(co: Co) -> None:
    """ControllerExpandVolume: node_expansion_required is false for a raw block volume."""
    volume = co.volume(block())
    size = 2 * (volume.capacity_bytes or co.options.parameters.size_bytes)
    assert not _expand(co, volume, size, block()).node_expansion_required


@case(175, CREATE, EXPAND, CHECKS_FS_TYPE)
@beyond(
    "ControllerExpandVolume Errors",
    "a capability that the volume does not support is INVALID_ARGUMENT; the field is OPTIONAL",
)
def test_expand_with_unsupported_capability_is_invalid(co: Co) -> None:
    """ControllerExpandVolume: a capability that the volume cannot have is INVALID_ARGUMENT, and it does not
    grow.
    """
    volume = co.volume()
    size = 2 * (volume.capacity_bytes or co.options.parameters.size_bytes)
    request = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id,
        capacity_range=csi_pb2.CapacityRange(required_bytes=size),
        volume_capability=mount(NO_FILESYSTEM),
    )
    co.refused(co.controller.ControllerExpandVolume, request, Code.INVALID_ARGUMENT)
    assert _expand(co, volume, 1).capacity_bytes < size


@case(176, CREATE, EXPAND, NODE, "plugin.OFFLINE")
@must(
    "ControllerExpandVolume Errors",
    "published, and no ONLINE expansion, MUST be FAILED_PRECONDITION",
)
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
@must(
    "ControllerModifyVolume Errors",
    "a volume that does not exist MUST be NOT_FOUND; volume_id is REQUIRED",
)
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
@must(
    "ControllerModifyVolume",
    "this operation MUST be idempotent; parameters that are not supported MUST be INVALID_ARGUMENT",
)
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
