"""ControllerExpandVolume (C-171 to C-176)."""

from crust.conformance.case import (
    BLOCK,
    CHECKS_FS_TYPE,
    CREATE,
    EXPAND,
    NODE,
    beyond,
    case,
    must,
    should,
)
from crust.conformance.options import UNKNOWN_VOLUME
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, block, mount
from crust.wire.csi.v1 import csi_pb2


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
    unknown = request(volume_id=UNKNOWN_VOLUME, capacity_range=size)
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
    "ControllerExpandVolume", "for a block device the SP MAY set node_expansion_required to false"
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
