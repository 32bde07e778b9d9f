"""What the controller says of a node: CSI pull request 603, as specs/node-identity.md has it (C-012 to C-017)."""

from crust.conformance.case import CREATE, FEW_VOLUMES, NODE, PUBLISH, beyond, case
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2

_INFO_FROM_CONTROLLER = ("controller.GET_NODE_INFO", "node.NODE_INFO_FROM_CONTROLLER")
_SOURCE = "CSI pull request 603"
_LOOKS = 20
"""The limit follows what other programs attach: it is compared when it did not change for a moment."""


@case(12, NODE, *_INFO_FROM_CONTROLLER)
@beyond(_SOURCE, "ControllerGetNodeInfo")
def test_controller_node_info_equals_node_info(co: Co) -> None:
    """ControllerGetNodeInfo (CSI PR #603): the topology and the limit of NodeGetInfo, which returns both unless
    the flag is set; NOT_FOUND for no such node, INVALID_ARGUMENT without an id.
    """
    for _ in range(_LOOKS):
        before, answer, after = _node_info(co), _ask(co), _node_info(co)
        if before == after:
            break
    assert answer.accessible_topology == before.accessible_topology
    assert answer.max_volumes_per_node == before.max_volumes_per_node
    flagged = csi_pb2.NodeGetInfoRequest(controller_get_node_info=True)
    assert co.ask(co.node.NodeGetInfo, flagged).node_id == before.node_id
    call, request = co.controller.ControllerGetNodeInfo, csi_pb2.ControllerGetNodeInfoRequest
    co.refused(call, request(node_id="conformance-no-such-node"), Code.NOT_FOUND)
    co.refused(call, request(), Code.INVALID_ARGUMENT)


@case(13, CREATE, PUBLISH, NODE, *_INFO_FROM_CONTROLLER)
@beyond(_SOURCE, "ControllerGetNodeInfo")
def test_controller_node_info_has_published_volume_ids(co: Co) -> None:
    """ControllerGetNodeInfo (CSI PR #603): published_volume_ids has each attached volume once, and no detached
    one.
    """
    volume = co.volume()
    assert volume.volume_id not in _ask(co).published_volume_ids
    co.attach(volume)
    assert list(_ask(co).published_volume_ids).count(volume.volume_id) == 1
    co.detach(volume.volume_id)
    assert volume.volume_id not in _ask(co).published_volume_ids


@case(14, NODE, *_INFO_FROM_CONTROLLER)
@beyond(_SOURCE, "ControllerGetNodeInfo")
def test_controller_node_info_refuses_malformed_ids(co: Co) -> None:
    """ControllerGetNodeInfo (CSI PR #603): INVALID_ARGUMENT for an id of more than 256 bytes, or with a control
    character.
    """
    call, request = co.controller.ControllerGetNodeInfo, csi_pb2.ControllerGetNodeInfoRequest
    for malformed in ("n" * 257, "n\u0001"):
        co.refused(call, request(node_id=malformed), Code.INVALID_ARGUMENT)


@case(15, "controller", "node")
@beyond(_SOURCE, "GET_NODE_INFO")
def test_node_that_returns_an_id_alone_has_a_controller_that_returns_the_rest(co: Co) -> None:
    """Capabilities (CSI PR #603): GET_ID and NODE_INFO_FROM_CONTROLLER of a node require GET_NODE_INFO of the
    controller.
    """
    if {"node.GET_ID", "node.NODE_INFO_FROM_CONTROLLER"} & co.has:
        assert "controller.GET_NODE_INFO" in co.has


@case(16, CREATE, PUBLISH, NODE, FEW_VOLUMES, *_INFO_FROM_CONTROLLER)
@beyond(_SOURCE, "ControllerGetNodeInfo")
def test_controller_node_info_of_a_full_node_leaves_no_free_slot(co: Co) -> None:
    """ControllerGetNodeInfo (CSI PR #603): after a RESOURCE_EXHAUSTED, the limit less the volumes that a CO does
    not know is not more than the volumes that it has there.
    """
    own, refused = set[str](), False
    for number in range(_node_info(co).max_volumes_per_node + 1):
        volume = co.volume()
        code, message = co.outcome(co.controller.ControllerPublishVolume, co.attach_request(volume))
        assert code in (Code.OK, Code.RESOURCE_EXHAUSTED), f"{code.name}: {message}"
        if refused := code is Code.RESOURCE_EXHAUSTED:
            break
        if number % 2:
            own.add(volume.volume_id)  # the others are those of a second CO
    assert refused, "a node takes more volumes than max_volumes_per_node"
    found = _ask(co)
    foreign = set(found.published_volume_ids) - own
    assert found.max_volumes_per_node - len(foreign) <= len(own)
    assert _ask(co, *own).max_volumes_per_node <= max(len(own), 1)


@case(17, CREATE, PUBLISH, NODE, *_INFO_FROM_CONTROLLER)
@beyond(_SOURCE, "ControllerGetNodeInfo")
def test_controller_node_info_for_a_co_that_names_its_volumes(co: Co) -> None:
    """ControllerGetNodeInfo (CSI PR #603, first form): for a request that names volumes the limit is less by the
    attached ones that it does not name.
    """
    first, second = co.volume(), co.volume()
    for each in (first, second):
        co.attach(each)
    limits = (0, 1)
    for _ in range(_LOOKS):
        everything = tuple(_ask(co).published_volume_ids)
        others = [each for each in everything if each != second.volume_id]
        before, less, after = _ask(co, *everything), _ask(co, *others), _ask(co, *everything)
        limits = (before.max_volumes_per_node, less.max_volumes_per_node)
        if before == after:
            break
    assert limits[1] == max(limits[0] - 1, 1) or limits[0] == 0


def _node_info(co: Co) -> csi_pb2.NodeGetInfoResponse:
    return co.ask(co.node.NodeGetInfo, csi_pb2.NodeGetInfoRequest())


def _ask(co: Co, *known: str) -> csi_pb2.ControllerGetNodeInfoResponse:
    request = csi_pb2.ControllerGetNodeInfoRequest(node_id=co.node_id(), published_volume_ids=known)
    return co.ask(co.controller.ControllerGetNodeInfo, request)
