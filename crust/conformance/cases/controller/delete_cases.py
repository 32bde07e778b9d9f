"""DeleteVolume (C-112 to C-114)."""

from crust.conformance.case import CREATE, NODE, beyond, case, must
from crust.conformance.options import MIB, UNKNOWN_VOLUME
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2


@case(112, CREATE)
@must("DeleteVolume", "idempotent: a volume that does not exist MUST be OK; volume_id is REQUIRED")
def test_delete_is_idempotent(co: Co) -> None:
    """DeleteVolume: OK for a volume that is deleted or never was; INVALID_ARGUMENT without an id."""
    volume = co.volume()
    co.delete(volume.volume_id)
    co.delete(volume.volume_id)
    co.delete(UNKNOWN_VOLUME)
    request = csi_pb2.DeleteVolumeRequest()
    co.refused(co.controller.DeleteVolume, request, Code.INVALID_ARGUMENT)


@case(113, CREATE)
@must("ValidateVolumeCapabilities Errors", "a volume that does not exist MUST be NOT_FOUND")
def test_a_deleted_volume_is_gone_and_its_name_is_free(co: Co) -> None:
    """DeleteVolume: afterwards the id is NOT_FOUND, and the name may be used for another volume."""
    request = co.create_request()
    volume = co.create(request)
    co.delete(volume.volume_id)
    validate = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id, volume_capabilities=[co.mount]
    )
    co.refused(co.controller.ValidateVolumeCapabilities, validate, Code.NOT_FOUND)
    request.capacity_range.required_bytes += 16 * MIB
    co.create(request)


@case(114, CREATE, NODE)
@must(
    "DeleteVolume Errors",
    "a volume that could not be deleted because it is in use MUST be FAILED_PRECONDITION",
)
@beyond(
    "DeleteVolume Errors",
    "a volume in use is not deleted; a controller that does not see the nodes may not know "
    "of the use",
)
def test_a_volume_in_use_is_not_deleted(co: Co) -> None:
    """DeleteVolume: not while the volume is published; a refusal is FAILED_PRECONDITION, and the data stays."""
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", b"kept")
    request = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
    code, message = co.outcome(co.controller.DeleteVolume, request)
    with co.beyond():
        assert code is not Code.OK, "a volume that is published was deleted"
    if code is Code.OK:
        return
    assert code is Code.FAILED_PRECONDITION, f"{code.name}: {message}"
    assert co.host.read(target / "file", 99) == b"kept"
