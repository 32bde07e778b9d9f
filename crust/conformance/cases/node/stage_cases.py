"""NodeStageVolume, NodeUnstageVolume (C-201 to C-205, C-225)."""

from crust.conformance.case import BLOCK, CREATE, STAGE, beyond, case, must
from crust.conformance.options import UNKNOWN_VOLUME
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import block
from crust.wire.csi.v1 import csi_pb2

_DATA = b"what a database has written"


@case(201, CREATE, STAGE)
@must(
    "NodeStageVolume Errors",
    "a volume that does not exist MUST be NOT_FOUND; volume_id, staging_target_path and "
    "volume_capability are REQUIRED",
)
def test_stage_needs_a_volume_a_path_and_a_capability(co: Co) -> None:
    """NodeStageVolume: INVALID_ARGUMENT without one of them; NOT_FOUND for no such volume."""
    volume = co.volume()
    co.attach(volume)
    for field in ("volume_id", "staging_target_path", "volume_capability"):
        request = co.stage_request(volume)
        request.ClearField(field)
        co.refused(co.node.NodeStageVolume, request, Code.INVALID_ARGUMENT)
    request = co.stage_request(volume)
    request.volume_id = UNKNOWN_VOLUME
    co.refused(co.node.NodeStageVolume, request, Code.NOT_FOUND)


@case(202, CREATE, STAGE)
@must(
    "NodeStageVolume, NodeUnstageVolume",
    "idempotent: staged already, and not staged, MUST be OK; a volume that does not exist "
    "is NOT_FOUND, or OK",
)
def test_stage_and_unstage_are_idempotent(co: Co) -> None:
    """NodeStageVolume, NodeUnstageVolume: OK again; unstage is OK for what was never staged, and OK or NOT_FOUND for
    no such volume.
    """
    volume = co.volume()
    co.stage(volume)
    co.ask(co.node.NodeStageVolume, co.stage_request(volume))
    request = csi_pb2.NodeUnstageVolumeRequest(
        volume_id=volume.volume_id, staging_target_path=str(co.staging(volume))
    )
    for _ in range(3):
        co.ask(co.node.NodeUnstageVolume, request)
    request.volume_id = UNKNOWN_VOLUME
    co.unknown(co.node.NodeUnstageVolume, request)


@case(203, STAGE)
@must(
    "NodeUnstageVolume",
    "volume_id and staging_target_path are REQUIRED (Error Scheme: INVALID_ARGUMENT)",
)
def test_unstage_needs_a_volume_and_a_path(co: Co) -> None:
    """NodeUnstageVolume: INVALID_ARGUMENT without one of them."""
    request = csi_pb2.NodeUnstageVolumeRequest
    call = co.node.NodeUnstageVolume
    co.refused(call, request(volume_id=UNKNOWN_VOLUME), Code.INVALID_ARGUMENT)
    co.refused(call, request(staging_target_path="/a"), Code.INVALID_ARGUMENT)


@case(204, CREATE, STAGE, BLOCK)
@must(
    "NodeStageVolume Errors",
    "staged at this path but incompatible with volume_capability MUST be ALREADY_EXISTS",
)
def test_stage_with_other_capability_is_already_exists(co: Co) -> None:
    """NodeStageVolume: another capability at the same path is ALREADY_EXISTS (or what a capability is that the
    volume does not have), and the volume stays staged.
    """
    volume = co.volume()
    co.stage(volume)
    request = co.stage_request(volume, block())
    other = (Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT)
    co.refused(co.node.NodeStageVolume, request, Code.ALREADY_EXISTS, *other)
    co.publish(volume)


@case(205, CREATE, STAGE)
@beyond(
    "NodeStageVolume",
    "the CO SHALL ensure that there is one staging_target_path per volume; a renamed volume "
    "has two",
)
def test_stage_at_second_path_keeps_data(co: Co) -> None:
    """NodeStageVolume: the same volume at another path (its PV was renamed) is not formatted."""
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", _DATA)
    other = co.staging(volume, "other")
    co.outcome(co.node.NodeStageVolume, co.stage_request(volume, path=other))
    assert co.host.read(target / "file", 99) == _DATA
    co.unpublish(volume.volume_id, target)
    co.unstage(volume, path=other)
    co.unstage(volume)
    assert co.host.read(co.use(volume) / "file", 99) == _DATA


@case(225, CREATE, STAGE)
@beyond(
    "NodeUnstageVolume",
    "the CO MUST call it after all NodeUnpublishVolume; what is published should survive a mistake",
)
def test_unstage_while_published_keeps_data(co: Co) -> None:
    """NodeUnstageVolume: before NodeUnpublishVolume it may be refused; what is published stays readable."""
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", _DATA)
    request = csi_pb2.NodeUnstageVolumeRequest(
        volume_id=volume.volume_id, staging_target_path=str(co.staging(volume))
    )
    co.outcome(co.node.NodeUnstageVolume, request)
    assert co.host.read(target / "file", 99) == _DATA
