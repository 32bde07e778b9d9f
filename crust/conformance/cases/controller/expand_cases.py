"""ControllerExpandVolume (C-171 to C-176)."""

from crust.conformance.options import UNKNOWN_VOLUME
from crust.conformance.orchestrator import expansion
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, block, mount
from crust.wire.csi.v1 import csi_pb2


def test_c171_expand_needs_a_volume_and_a_size(co: Co) -> None:
    volume = co.volume()
    size = csi_pb2.CapacityRange(required_bytes=2 * co.options.parameters.size_bytes)
    request = csi_pb2.ControllerExpandVolumeRequest
    co.refused(request(capacity_range=size), Code.INVALID_ARGUMENT)
    co.refused(request(volume_id=volume.volume_id), Code.INVALID_ARGUMENT)
    unknown = request(volume_id=UNKNOWN_VOLUME, capacity_range=size)
    co.refused(unknown, Code.NOT_FOUND)


def test_c172_a_volume_grows_and_never_shrinks(co: Co) -> None:
    volume = co.volume()
    size = expansion.doubled(co, volume)
    assert co.ask(expansion.controller_request(co, volume, size)).capacity_bytes >= size
    assert co.ask(expansion.controller_request(co, volume, size)).capacity_bytes >= size
    smaller = size
    with co.should():
        smaller = co.ask(expansion.controller_request(co, volume, 1)).capacity_bytes
    assert smaller >= size, "the volume has shrunk"


def test_c173_expand_beyond_limits_is_out_of_range(co: Co) -> None:
    volume = co.volume()
    request = expansion.controller_request(co, volume, 1 << 60)
    code, message = co.outcome(request)
    assert code in (Code.OK, Code.OUT_OF_RANGE, Code.RESOURCE_EXHAUSTED), f"{code.name}: {message}"
    if code is Code.OK:  # a volume without a size of its own
        assert co.ask(request).capacity_bytes >= request.capacity_range.required_bytes
    request.capacity_range.CopyFrom(csi_pb2.CapacityRange(required_bytes=1, limit_bytes=2))
    with co.beyond():
        co.refused(request, Code.OUT_OF_RANGE)


def test_c174_a_raw_volume_needs_no_expansion_on_the_node(co: Co) -> None:
    volume = co.volume(block())
    size = expansion.doubled(co, volume)
    assert not co.ask(
        expansion.controller_request(co, volume, size, block())
    ).node_expansion_required


def test_c175_expand_with_unsupported_capability_is_invalid(co: Co) -> None:
    volume = co.volume()
    size = expansion.doubled(co, volume)
    request = expansion.controller_request(co, volume, size, mount(NO_FILESYSTEM))
    co.refused(request, Code.INVALID_ARGUMENT)
    assert co.ask(expansion.controller_request(co, volume, 1)).capacity_bytes < size


def test_c176_offline_expand_of_published_volume_is_failed_precondition(co: Co) -> None:
    volume = co.volume()
    co.use(volume)
    co.refused(expansion.controller_request(co, volume), Code.FAILED_PRECONDITION)
