"""ControllerPublishVolume, ControllerUnpublishVolume (C-161 to C-167)."""

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator.calls import UNKNOWN, Code, check_code
from crust_conformance.orchestrator.capabilities import READONLY
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.volume_capabilities import block


def test_c161_attach_needs_a_volume_a_node_and_a_capability(co: Co) -> None:
    request = co.attach_request(co.volume())
    co.refused_without(request, "volume_id", "node_id", "volume_capability")
    co.refused_with_unknown(request, "volume_id", "node_id")


def test_c162_attach_and_detach_are_idempotent(co: Co) -> None:
    volume = co.volume()
    co.attach(volume)
    first, second = co.ask(co.attach_request(volume)), co.ask(co.attach_request(volume))
    assert first.publish_context == second.publish_context
    co.detach(volume.volume_id)
    co.detach(volume.volume_id)
    with co.should():
        co.detach(UNKNOWN)
    co.refused_without(co.detach_request(UNKNOWN), "volume_id")


def test_c163_attach_with_other_readonly_is_already_exists(co: Co) -> None:
    volume = co.volume()
    co.attach(volume)
    request = co.attach_request(volume, readonly=True)
    co.answered(request, Code.ALREADY_EXISTS)


def test_c164_detach_without_node_id_detaches_from_all_nodes(co: Co) -> None:
    volume = co.volume()
    co.attach(volume)
    request = csi_pb2.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id)
    co.ask(request)
    # The volume is attached no more, so another kind of attach succeeds.
    co.attach(volume, readonly=READONLY in co.has)
    co.detach(volume.volume_id)
    co.delete(volume.volume_id)


def test_c165_attach_to_second_node_is_failed_precondition(co: Co) -> None:
    volume = co.volume()
    co.attach(volume)
    request = co.attach_request(volume)
    request.node_id = co.options.parameters.other_node_id
    code, message = co.outcome(request)
    check_code(request, code, Code.FAILED_PRECONDITION)
    with co.should():
        assert co.node_id() in message, "the message does not name the other node"


def test_c166_attach_above_max_volumes_is_resource_exhausted(co: Co) -> None:
    info = co.node_info()
    attached = list[csi_pb2.Volume]()
    for _ in range(info.max_volumes_per_node + 1):
        volume = co.volume()
        request = co.attach_request(volume)
        code, _ = co.outcome(request)
        if code is not Code.OK:
            break
        attached.append(volume)
    with co.beyond():
        assert code is not Code.OK, f"more than {info.max_volumes_per_node} volumes are attached"
    check_code(request, code, Code.OK, Code.RESOURCE_EXHAUSTED)
    if attached and code is not Code.OK:
        co.ask(co.attach_request(attached[-1]))
        co.detach(attached.pop().volume_id)
        co.ask(co.attach_request(volume))


def test_c167_attach_with_other_capability_is_already_exists(co: Co) -> None:
    volume = co.volume_for(co.mount, block())
    co.attach(volume)
    request = co.attach_request(volume, block())
    co.answered(request, Code.ALREADY_EXISTS)
