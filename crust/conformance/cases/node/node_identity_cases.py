"""What the controller says of a node: CSI pull request 603, as specs/node-identity.md has it (C-012 to C-017)."""

from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2

_LOOKS = 20
"""The limit follows what other programs attach: it is compared when it did not change for a moment."""


def test_c012_controller_node_info_equals_node_info(co: Co) -> None:
    for _ in range(_LOOKS):
        before, answer, after = _node_info(co), _ask(co), _node_info(co)
        if before == after:
            break
    assert answer.accessible_topology == before.accessible_topology
    assert answer.max_volumes_per_node == before.max_volumes_per_node
    flagged = csi_pb2.NodeGetInfoRequest(controller_get_node_info=True)
    assert co.ask(flagged).node_id == before.node_id
    request = csi_pb2.ControllerGetNodeInfoRequest
    co.refused(request(node_id="conformance-no-such-node"), Code.NOT_FOUND)
    co.refused(request(), Code.INVALID_ARGUMENT)


def test_c013_controller_node_info_has_published_volume_ids(co: Co) -> None:
    volume = co.volume()
    assert volume.volume_id not in _ask(co).published_volume_ids
    co.attach(volume)
    assert list(_ask(co).published_volume_ids).count(volume.volume_id) == 1
    co.detach(volume.volume_id)
    assert volume.volume_id not in _ask(co).published_volume_ids


def test_c014_controller_node_info_refuses_malformed_ids(co: Co) -> None:
    request = csi_pb2.ControllerGetNodeInfoRequest
    for malformed in ("n" * 257, "n\u0001"):
        co.refused(request(node_id=malformed), Code.INVALID_ARGUMENT)


def test_c015_node_that_returns_an_id_alone_has_a_controller_that_returns_the_rest(co: Co) -> None:
    if {"node.GET_ID", "node.NODE_INFO_FROM_CONTROLLER"} & co.has:
        assert "controller.GET_NODE_INFO" in co.has


def test_c016_controller_node_info_of_a_full_node_leaves_no_free_slot(co: Co) -> None:
    own, refused = set[str](), False
    for number in range(_node_info(co).max_volumes_per_node + 1):
        volume = co.volume()
        code, message = co.outcome(co.attach_request(volume))
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


def test_c017_controller_node_info_for_a_co_that_names_its_volumes(co: Co) -> None:
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
    return co.ask(csi_pb2.NodeGetInfoRequest())


def _ask(co: Co, *known: str) -> csi_pb2.ControllerGetNodeInfoResponse:
    request = csi_pb2.ControllerGetNodeInfoRequest(node_id=co.node_id(), published_volume_ids=known)
    return co.ask(request)
