"""ValidateVolumeCapabilities (C-121 to C-124)."""

from crust.conformance.options import UNKNOWN_VOLUME
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, mount
from crust.wire.csi.v1 import csi_pb2


def test_c121_validate_needs_a_volume_and_capabilities(co: Co) -> None:
    volume = co.volume()
    request = csi_pb2.ValidateVolumeCapabilitiesRequest
    co.refused(request(volume_capabilities=[co.mount]), Code.INVALID_ARGUMENT)
    co.refused(request(volume_id=volume.volume_id), Code.INVALID_ARGUMENT)
    unknown = request(volume_id=UNKNOWN_VOLUME, volume_capabilities=[co.mount])
    co.refused(unknown, Code.NOT_FOUND)


def test_c122_validate_confirms_what_was_created(co: Co) -> None:
    volume = co.volume()
    request = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id,
        volume_capabilities=[co.mount],
        volume_context=volume.volume_context,
        parameters=co.options.parameters.parameters,
    )
    answer = co.ask(request)
    assert answer.HasField("confirmed"), answer.message
    assert co.mount in answer.confirmed.volume_capabilities
    assert dict(answer.confirmed.volume_context) in ({}, dict(volume.volume_context))
    assert dict(answer.confirmed.parameters) in ({}, co.options.parameters.parameters)


def test_c123_validate_confirms_all_or_nothing(co: Co) -> None:
    volume = co.volume()
    request = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id,
        volume_capabilities=[co.mount],
        volume_context={"crust-conformance": "not the volume's"},
    )
    answer = co.ask(request)
    assert not answer.HasField("confirmed")
    assert answer.message


def test_c124_validate_confirms_every_capability_or_none(co: Co) -> None:
    request = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=co.volume().volume_id, volume_capabilities=[co.mount, mount(NO_FILESYSTEM)]
    )
    answer = co.ask(request)
    assert not answer.HasField("confirmed")
    with co.beyond():
        assert answer.message, "there is no message"
