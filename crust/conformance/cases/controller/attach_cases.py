"""ControllerPublishVolume, ControllerUnpublishVolume (C-161 to C-167)."""

from crust.conformance.case import (
    BLOCK,
    CREATE,
    FEW_VOLUMES,
    NODE,
    PUBLISH,
    READONLY,
    beyond,
    case,
    must,
    should,
)
from crust.conformance.options import UNKNOWN_VOLUME
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import block
from crust.wire.csi.v1 import csi_pb2


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
        setattr(request, field, UNKNOWN_VOLUME)
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
        co.detach(UNKNOWN_VOLUME)
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
    "ControllerUnpublishVolume", "without node_id the SP MUST unpublish the volume from all nodes"
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
    "ControllerPublishVolume Errors", "the plugin SHOULD specify the other node_id in the message"
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
