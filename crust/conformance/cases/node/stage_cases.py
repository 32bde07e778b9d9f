"""NodeStageVolume, NodeUnstageVolume (C-201 to C-205, C-225)."""

from crust.conformance.options import UNKNOWN_VOLUME
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import block
from crust.wire.csi.v1 import csi_pb2

_DATA = b"what a database has written"


def test_c201_stage_needs_a_volume_a_path_and_a_capability(co: Co) -> None:
    volume = co.volume()
    co.attach(volume)
    for field in ("volume_id", "staging_target_path", "volume_capability"):
        request = co.stage_request(volume)
        request.ClearField(field)
        co.refused(request, Code.INVALID_ARGUMENT)
    request = co.stage_request(volume)
    request.volume_id = UNKNOWN_VOLUME
    co.refused(request, Code.NOT_FOUND)


def test_c202_stage_and_unstage_are_idempotent(co: Co) -> None:
    volume = co.volume()
    co.stage(volume)
    co.ask(co.stage_request(volume))
    request = co.unstage_request(volume)
    for _ in range(3):
        co.ask(request)
    request.volume_id = UNKNOWN_VOLUME
    co.unknown(request)


def test_c203_unstage_needs_a_volume_and_a_path(co: Co) -> None:
    request = csi_pb2.NodeUnstageVolumeRequest
    co.refused(request(volume_id=UNKNOWN_VOLUME), Code.INVALID_ARGUMENT)
    co.refused(request(staging_target_path="/a"), Code.INVALID_ARGUMENT)


def test_c204_stage_with_other_capability_is_already_exists(co: Co) -> None:
    volume = co.volume()
    co.stage(volume)
    request = co.stage_request(volume, block())
    other = (Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT)
    co.refused(request, Code.ALREADY_EXISTS, *other)
    co.publish(volume)


def test_c205_stage_at_second_path_keeps_data(co: Co) -> None:
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", _DATA)
    other = co.staging(volume, "other")
    co.outcome(co.stage_request(volume, path=other))
    assert co.host.read(target / "file", 99) == _DATA
    co.unpublish(volume.volume_id, target)
    co.unstage(volume, path=other)
    co.unstage(volume)
    assert co.host.read(co.use(volume) / "file", 99) == _DATA


def test_c225_unstage_while_published_keeps_data(co: Co) -> None:
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", _DATA)
    request = co.unstage_request(volume)
    co.outcome(request)
    assert co.host.read(target / "file", 99) == _DATA
