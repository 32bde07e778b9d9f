"""DeleteVolume (C-112 to C-114)."""

from crust.conformance.options import MIB, UNKNOWN_VOLUME
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2


def test_c112_delete_is_idempotent(co: Co) -> None:
    volume = co.volume()
    co.delete(volume.volume_id)
    co.delete(volume.volume_id)
    co.delete(UNKNOWN_VOLUME)
    request = csi_pb2.DeleteVolumeRequest()
    co.refused(request, Code.INVALID_ARGUMENT)


def test_c113_a_deleted_volume_is_gone_and_its_name_is_free(co: Co) -> None:
    request = co.create_request()
    volume = co.create(request)
    co.delete(volume.volume_id)
    validate = co.validate_request(volume, co.mount)
    co.refused(validate, Code.NOT_FOUND)
    request.capacity_range.required_bytes += 16 * MIB
    co.create(request)


def test_c114_a_volume_in_use_is_not_deleted(co: Co) -> None:
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", b"kept")
    request = co.delete_request(volume.volume_id)
    code, message = co.outcome(request)
    with co.beyond():
        assert code is not Code.OK, "a volume that is published was deleted"
    if code is Code.OK:
        return
    assert code is Code.FAILED_PRECONDITION, f"{code.name}: {message}"
    assert co.host.read(target / "file", 99) == b"kept"
