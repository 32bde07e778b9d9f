"""ValidateVolumeCapabilities (C-121 to C-124)."""

from crust.conformance.case import CHECKS_FS_TYPE, CREATE, beyond, case, must
from crust.conformance.options import UNKNOWN_VOLUME
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, mount
from crust.wire.csi.v1 import csi_pb2


@case(121, CREATE)
@must(
    "ValidateVolumeCapabilities Errors",
    "a volume that does not exist MUST be NOT_FOUND; volume_id and volume_capabilities are "
    "REQUIRED",
)
def test_validate_needs_a_volume_and_capabilities(co: Co) -> None:
    """ValidateVolumeCapabilities: INVALID_ARGUMENT without id or capabilities; NOT_FOUND for no such volume."""
    volume = co.volume()
    request = csi_pb2.ValidateVolumeCapabilitiesRequest
    call = co.controller.ValidateVolumeCapabilities
    co.refused(call, request(volume_capabilities=[co.mount]), Code.INVALID_ARGUMENT)
    co.refused(call, request(volume_id=volume.volume_id), Code.INVALID_ARGUMENT)
    unknown = request(volume_id=UNKNOWN_VOLUME, volume_capabilities=[co.mount])
    co.refused(call, unknown, Code.NOT_FOUND)


@case(122, CREATE)
@must(
    "ValidateVolumeCapabilities",
    "the SP MUST provision a volume with ALL capabilities that it was created with; "
    "confirmed.volume_capabilities is REQUIRED",
)
def test_validate_confirms_what_was_created(co: Co) -> None:
    """ValidateVolumeCapabilities: what the volume was created with is confirmed, and returned."""
    volume = co.volume()
    request = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id,
        volume_capabilities=[co.mount],
        volume_context=volume.volume_context,
        parameters=co.options.parameters.parameters,
    )
    answer = co.ask(co.controller.ValidateVolumeCapabilities, request)
    assert answer.HasField("confirmed"), answer.message
    assert co.mount in answer.confirmed.volume_capabilities
    assert dict(answer.confirmed.volume_context) in ({}, dict(volume.volume_context))
    assert dict(answer.confirmed.parameters) in ({}, co.options.parameters.parameters)


@case(123, CREATE)
@beyond(
    "ValidateVolumeCapabilities",
    "a CO MUST send the volume's own context; that a plugin compares it, and says so in "
    "message, is practice",
)
def test_validate_confirms_all_or_nothing(co: Co) -> None:
    """ValidateVolumeCapabilities: with a context that is not the volume's, OK, nothing confirmed, and a
    message.
    """
    volume = co.volume()
    request = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id,
        volume_capabilities=[co.mount],
        volume_context={"crust-conformance": "not the volume's"},
    )
    answer = co.ask(co.controller.ValidateVolumeCapabilities, request)
    assert not answer.HasField("confirmed")
    assert answer.message


@case(124, CREATE, CHECKS_FS_TYPE)
@must(
    "ValidateVolumeCapabilities",
    "SHALL return confirmed only if all the capabilities are supported",
)
@beyond(
    "ValidateVolumeCapabilities", "message is OPTIONAL; it tells the CO why nothing is confirmed"
)
def test_validate_confirms_every_capability_or_none(co: Co) -> None:
    """ValidateVolumeCapabilities: a capability that the volume has and one that it does not have: OK,
    nothing confirmed, and a message.
    """
    request = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=co.volume().volume_id, volume_capabilities=[co.mount, mount(NO_FILESYSTEM)]
    )
    answer = co.ask(co.controller.ValidateVolumeCapabilities, request)
    assert not answer.HasField("confirmed")
    with co.beyond():
        assert answer.message, "there is no message"
