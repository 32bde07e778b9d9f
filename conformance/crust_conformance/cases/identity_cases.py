"""Identity, capabilities, a node's report of itself, and the controller's report of a node (C-001 to C-018).

The last is CSI pull request 603, as described in specs/node-identity.md.
"""

import re
import stat
from pathlib import Path

from google.protobuf.message import Message

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator.calls import Code
from crust_conformance.orchestrator.capabilities import CONSTRAINTS
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.optional_rpcs import RPCS

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_TOPOLOGY_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}\w)?")
_TOPOLOGY_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_ADDITIONS = 20000
"""CSI numbers its capabilities from 1; the numbers of others are far above."""
_REQUESTS: dict[str, Message] = {
    "controller": csi_pb2.ControllerGetCapabilitiesRequest(),
    "node": csi_pb2.NodeGetCapabilitiesRequest(),
}
_ONLY_1_12 = {"controller": {11}, "node": {4}}
_ONLY_1_13 = {"controller": {16, 17}, "node": {7, 8}}
_BESIDE = {
    "controller.LIST_VOLUMES_PUBLISHED_NODES": {"controller.PUBLISH_UNPUBLISH_VOLUME"},
    "controller.LIST_VOLUME_HEALTH": {"controller.GET_VOLUME_HEALTH"},
    "plugin.ONLINE": {"controller.EXPAND_VOLUME", "node.EXPAND_VOLUME"},
    "plugin.OFFLINE": {"controller.EXPAND_VOLUME"},
}
"""What has to be advertised, too: one of these."""
_LOOKS = 20
"""The limit changes when other programs attach: the case compares it when it has not changed for a moment."""


def test_c001_the_plugin_has_a_name(co: Co) -> None:
    info = co.ask(csi_pb2.GetPluginInfoRequest())
    assert _NAME.fullmatch(info.name), info.name
    assert info.vendor_version, "vendor_version is empty"


def test_c002_probe_is_ready_each_time(co: Co) -> None:
    for _ in range(3):
        answer = co.ask(csi_pb2.ProbeRequest())
        with co.beyond():
            assert not answer.HasField("ready") or answer.ready.value, "not ready"


def test_c003_what_is_advertised_is_advertised_once(co: Co) -> None:
    for first, later in zip(_capabilities(co), _capabilities(co), strict=True):
        texts = [item.SerializeToString(deterministic=True) for item in first]
        assert sorted(texts) == sorted(item.SerializeToString(deterministic=True) for item in later)
        with co.beyond():
            assert len(set(texts)) == len(texts), f"a capability twice: {first}"
            assert all(texts), f"a capability without a type: {first}"


def test_c004_controller_service_is_advertised_where_it_is_served(co: Co) -> None:
    # A node's instance also advertises the services of the controller's instance.
    assert "plugin.CONTROLLER_SERVICE" in co.has or "controller" not in co.has


def test_c005_what_is_not_advertised_is_unimplemented(co: Co) -> None:
    for rpc in RPCS:
        if rpc.needs not in co.has:
            co.answered(rpc.request, Code.UNIMPLEMENTED)


def test_c006_a_profile_has_its_own_capabilities_only(co: Co) -> None:
    foreign = _ONLY_1_12 if co.options.profile == "1.13" else _ONLY_1_13
    controller, node = _types(co)
    of_other_profile = (controller & foreign["controller"], node & foreign["node"])
    assert not any(of_other_profile), (
        f"CSI {co.options.profile} lacks these capabilities of the controller and the node: {of_other_profile};"
        " --profile names the driver's version of CSI"
    )


def test_c007_capabilities_of_deferral_need_opt_in(co: Co) -> None:
    assert all(number < _ADDITIONS for types in _types(co) for number in types)
    info = co.node_info()
    assert not list(info.supported_file_systems)


def test_c008_the_node_has_an_id(co: Co) -> None:
    info = co.node_info()
    assert info.node_id
    assert info.max_volumes_per_node >= 0
    assert co.node_id() == info.node_id


def test_c009_the_node_has_a_topology(co: Co) -> None:
    info = co.node_info()
    segments = dict(info.accessible_topology.segments)
    with co.beyond():
        assert segments, "the node has no topology"
    assert len({key.lower() for key in segments}) == len(segments)
    for key, value in segments.items():
        assert _TOPOLOGY_KEY.fullmatch(key), key
        assert _TOPOLOGY_VALUE.fullmatch(value), value


def test_c010_nothing_lies_beside_the_socket(co: Co) -> None:
    beside = list(Path(co.options.socket).parent.iterdir())
    files = [path.name for path in beside if not stat.S_ISSOCK(path.lstat().st_mode)]
    assert not files, f"beside the socket: {files}"


def test_c011_node_get_id_returns_node_id(co: Co) -> None:
    assert co.ask(csi_pb2.NodeGetIDRequest()).node_id == co.node_id()


def _capabilities(co: Co) -> list[list[Message]]:
    supported = [request for service, request in _REQUESTS.items() if service in co.has]
    requests = [csi_pb2.GetPluginCapabilitiesRequest(), *supported]
    return [list(co.ask(request).capabilities) for request in requests]


def _types(co: Co) -> tuple[set[int], set[int]]:
    types = {"controller": set[int](), "node": set[int]()}
    for service, request in _REQUESTS.items():
        if service in co.has:
            types[service] = {capability.rpc.type for capability in co.ask(request).capabilities}
    return types["controller"], types["node"]


def test_c012_controller_node_info_equals_node_info(co: Co) -> None:
    for _ in range(_LOOKS):
        first, answer, last = co.node_info(), _ask(co), co.node_info()
        if first == last:
            break
    assert answer.accessible_topology == first.accessible_topology
    assert answer.max_volumes_per_node == first.max_volumes_per_node
    flagged = csi_pb2.NodeGetInfoRequest(controller_get_node_info=True)
    assert co.ask(flagged).node_id == first.node_id
    request = csi_pb2.ControllerGetNodeInfoRequest
    co.answered(request(node_id="conformance-no-such-node"), Code.NOT_FOUND)
    co.answered(request(), Code.INVALID_ARGUMENT)


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
        co.answered(request(node_id=malformed), Code.INVALID_ARGUMENT)


def test_c015_node_that_returns_an_id_alone_has_a_controller_that_returns_the_rest(co: Co) -> None:
    if {"node.GET_ID", "node.NODE_INFO_FROM_CONTROLLER"} & co.has:
        assert "controller.GET_NODE_INFO" in co.has


def test_c016_controller_node_info_of_a_full_node_leaves_no_free_slot(co: Co) -> None:
    own_ids, refused = set[str](), False
    for number in range(co.node_info().max_volumes_per_node + 1):
        volume = co.volume()
        code = co.answered(co.attach_request(volume), Code.OK, Code.RESOURCE_EXHAUSTED)
        if refused := code is Code.RESOURCE_EXHAUSTED:
            break
        if number % 2:
            own_ids.add(volume.volume_id)  # the other volumes belong to a second CO
    assert refused, "a node takes more volumes than max_volumes_per_node"
    info = _ask(co)
    foreign = set(info.published_volume_ids) - own_ids
    assert info.max_volumes_per_node - len(foreign) <= len(own_ids)
    assert _ask(co, *own_ids).max_volumes_per_node <= max(len(own_ids), 1)


def test_c017_controller_node_info_for_a_co_that_names_its_volumes(co: Co) -> None:
    first, second = co.volume(), co.volume()
    for volume in (first, second):
        co.attach(volume)
    limits = (0, 1)
    for _ in range(_LOOKS):
        everything = tuple(_ask(co).published_volume_ids)
        other_ids = [volume_id for volume_id in everything if volume_id != second.volume_id]
        full, partial, repeated = _ask(co, *everything), _ask(co, *other_ids), _ask(co, *everything)
        limits = (full.max_volumes_per_node, partial.max_volumes_per_node)
        if full == repeated:
            break
    assert limits[1] == max(limits[0] - 1, 1) or limits[0] == 0


def test_c018_a_capability_has_those_that_csi_demands_beside_it(co: Co) -> None:
    for capability, beside in _BESIDE.items():
        assert capability not in co.has or beside & co.has, (
            f"{capability} is advertised without {' or '.join(sorted(beside))}"
        )
    if "node.info" in co.has and co.node_info().accessible_topology.segments:
        assert CONSTRAINTS in co.has, f"NodeGetInfo has a topology without {CONSTRAINTS}"


def _ask(co: Co, *ids: str) -> csi_pb2.ControllerGetNodeInfoResponse:
    request = csi_pb2.ControllerGetNodeInfoRequest(node_id=co.node_id(), published_volume_ids=ids)
    return co.ask(request)
