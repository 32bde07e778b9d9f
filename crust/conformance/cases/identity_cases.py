"""Identity, capabilities, and what a node reports of itself (C-001 to C-011)."""

import re
import stat
from pathlib import Path

from google.protobuf.message import Message

from crust.conformance.case import (
    NODE,
    NODE_INFO,
    TOPOLOGY,
    beyond,
    case,
    must,
    should,
)
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.optional_rpcs import RPCS
from crust.wire.csi.v1 import csi_pb2

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_TOPOLOGY_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}\w)?")
_TOPOLOGY_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_ADDITIONS = 20000
"""CSI numbers its capabilities from 1; what is not of CSI is far above."""
_ONLY_1_12 = {"controller": {11}, "node": {4}}
_ONLY_1_13 = {"controller": {16, 17}, "node": {7, 8}}


@case(1)
@must(
    "GetPluginInfo",
    "the name MUST be 63 characters or less, alphanumeric at both ends, dashes, dots and "
    "alphanumerics between; name and vendor_version are REQUIRED",
)
def test_the_plugin_has_a_name(co: Co) -> None:
    """GetPluginInfo: a name of at most 63 characters, letters, digits, `-`, `.`, `_`, alphanumeric at both
    ends.
    """
    info = co.ask(co.identity.GetPluginInfo, csi_pb2.GetPluginInfoRequest())
    assert _NAME.fullmatch(info.name), info.name
    assert info.vendor_version, "vendor_version is empty"


@case(2)
@must("Probe", "a Plugin MUST implement this RPC call")
@beyond(
    "Probe",
    "ready=false is allowed while a plugin initializes; the suite expects one that has",
)
def test_probe_is_ready_each_time(co: Co) -> None:
    """Probe: OK and ready, or with no value, which means ready; every time."""
    for _ in range(3):
        answer = co.ask(co.identity.Probe, csi_pb2.ProbeRequest())
        with co.beyond():
            assert not answer.HasField("ready") or answer.ready.value, "not ready"


@case(3)
@must(
    "GetPluginCapabilities",
    "all instances of one version SHALL return the same set of capabilities",
)
@beyond("GetPluginCapabilities", "a set has nothing twice, and nothing without a type")
def test_what_is_advertised_is_advertised_once(co: Co) -> None:
    """Capabilities: no duplicates, none of type UNKNOWN, the same at every call."""
    for first, again in zip(_capabilities(co), _capabilities(co), strict=True):
        texts = [each.SerializeToString(deterministic=True) for each in first]
        assert sorted(texts) == sorted(each.SerializeToString(deterministic=True) for each in again)
        with co.beyond():
            assert len(set(texts)) == len(texts), f"a capability twice: {first}"
            assert all(texts), f"a capability without a type: {first}"


@case(4)
@should(
    "GetPluginCapabilities",
    "plugins SHOULD provide CONTROLLER_SERVICE; it tells whether the CO will invoke the service",
)
def test_controller_service_is_advertised_where_it_is_served(co: Co) -> None:
    """GetPluginCapabilities: CONTROLLER_SERVICE where the Controller service is served."""
    # A node's instance advertises what the controller's instance serves.
    assert "plugin.CONTROLLER_SERVICE" in co.has or "controller" not in co.has


@case(5)
@should(
    "Volume Lifecycle",
    "unsupported RPCs SHOULD return an appropriate error code that indicates such; Error "
    "Scheme: UNIMPLEMENTED",
)
def test_what_is_not_advertised_is_unimplemented(co: Co) -> None:
    """Error Scheme: an RPC whose capability is not advertised is UNIMPLEMENTED, not an empty success."""
    for rpc in RPCS:
        if rpc.needs in co.has:
            continue
        if rpc.streams:
            co.stream_refused(rpc.method(co), rpc.request, Code.UNIMPLEMENTED)
        else:
            co.refused(rpc.method(co), rpc.request, Code.UNIMPLEMENTED)


@case(6, "option.profile")
@beyond(
    "ControllerGetCapabilities, NodeGetCapabilities",
    "the enums of CSI 1.12 and 1.13 differ; the other one's values mean nothing to a CO",
)
def test_a_profile_has_its_own_capabilities_only(co: Co) -> None:
    """Under CSI 1.13 nothing of the volume condition is advertised, under 1.12 nothing of volume health."""
    foreign = _ONLY_1_12 if co.options.profile == "1.13" else _ONLY_1_13
    controller, node = _types(co)
    of_other_profile = (controller & foreign["controller"], node & foreign["node"])
    assert not any(of_other_profile), (
        f"CSI {co.options.profile} does not have what the controller and the node advertise: {of_other_profile};"
        " --profile says which CSI the driver speaks"
    )


@case(7, NODE, NODE_INFO)
@beyond("crust's deferral D-3", "what CSI does not have is advertised to callers that opt in")
def test_capabilities_of_deferral_need_opt_in(co: Co) -> None:
    """Deferral D-3: a caller that did not opt in sees no capability that CSI does not have."""
    assert all(each < _ADDITIONS for types in _types(co) for each in types)
    info = co.ask(co.node.NodeGetInfo, csi_pb2.NodeGetInfoRequest())
    assert not list(info.supported_file_systems)


@case(8, NODE, NODE_INFO)
@must(
    "NodeGetInfo",
    "node_id is REQUIRED and SHALL NOT exceed 256 bytes; max_volumes_per_node MUST NOT be negative",
)
def test_the_node_has_an_id(co: Co) -> None:
    """NodeGetInfo: an id of 1 to 256 bytes, the same at every call, and an attach limit that is not
    negative.
    """
    info = co.ask(co.node.NodeGetInfo, csi_pb2.NodeGetInfoRequest())
    assert info.node_id
    assert info.max_volumes_per_node >= 0
    assert co.node_id() == info.node_id


@case(9, NODE, NODE_INFO, TOPOLOGY)
@must(
    "Topology",
    "keys MUST be case-insensitive; key names and values MUST be 63 characters or less, "
    "alphanumeric at both ends",
)
@beyond(
    "NodeGetInfo",
    "accessible_topology is OPTIONAL; without it VOLUME_ACCESSIBILITY_CONSTRAINTS says nothing",
)
def test_the_node_has_a_topology(co: Co) -> None:
    """NodeGetInfo: accessible_topology where constraints are advertised; keys unique without regard to case."""
    info = co.ask(co.node.NodeGetInfo, csi_pb2.NodeGetInfoRequest())
    segments = dict(info.accessible_topology.segments)
    with co.beyond():
        assert segments, "the node has no topology"
    assert len({key.lower() for key in segments}) == len(segments)
    for key, value in segments.items():
        assert _TOPOLOGY_KEY.fullmatch(key), key
        assert _TOPOLOGY_VALUE.fullmatch(value), value


@case(10)
@should(
    "Filesystem",
    "plugins SHALL NOT create files or directories adjacent to the socket; a warning, "
    "because the suite cannot tell who made them",
)
def test_nothing_lies_beside_the_socket(co: Co) -> None:
    """CSI_ENDPOINT: a plugin makes no other file or directory beside its socket."""
    beside = list(Path(co.options.socket).parent.iterdir())
    others = [each.name for each in beside if not stat.S_ISSOCK(each.lstat().st_mode)]
    assert not others, f"beside the socket: {others}"


@case(11, NODE, "node.GET_ID")
@beyond("CSI pull request 603", "NodeGetID")
def test_node_get_id_returns_node_id(co: Co) -> None:
    """NodeGetID (CSI PR #603): the id that NodeGetInfo returns."""
    assert co.ask(co.node.NodeGetID, csi_pb2.NodeGetIDRequest()).node_id == co.node_id()


def _capabilities(co: Co) -> list[list[Message]]:
    plugin = co.ask(co.identity.GetPluginCapabilities, csi_pb2.GetPluginCapabilitiesRequest())
    found: list[list[Message]] = [list(plugin.capabilities)]
    if "controller" in co.has:
        request = csi_pb2.ControllerGetCapabilitiesRequest()
        found.append(list(co.ask(co.controller.ControllerGetCapabilities, request).capabilities))
    if "node" in co.has:
        asked = csi_pb2.NodeGetCapabilitiesRequest()
        found.append(list(co.ask(co.node.NodeGetCapabilities, asked).capabilities))
    return found


def _types(co: Co) -> tuple[set[int], set[int]]:
    controller: set[int] = set()
    node: set[int] = set()
    if "controller" in co.has:
        request = csi_pb2.ControllerGetCapabilitiesRequest()
        answer = co.ask(co.controller.ControllerGetCapabilities, request)
        controller = {each.rpc.type for each in answer.capabilities}
    if "node" in co.has:
        asked = csi_pb2.NodeGetCapabilitiesRequest()
        node = {each.rpc.type for each in co.ask(co.node.NodeGetCapabilities, asked).capabilities}
    return controller, node
