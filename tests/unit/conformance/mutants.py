"""Drivers that break one rule each, and the case that must fail."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from crust.conformance.case import Strength
from crust.wire.csi.v1 import csi_pb2
from tests.support.memory_csi.driver import Twist
from tests.support.memory_csi.state import Code, Refused


@dataclass(frozen=True)
class Mutant:
    """One broken driver. `strength` is that of the clause that it breaks, where that is not the case's own."""

    case: str
    name: str
    twist: Callable[[], Twist] = field(default=lambda: _honest)
    faults: tuple[str, ...] = ()
    profile: Any = "1.13"
    offline: bool = False
    strength: Strength | None = None


def warned(mutant: Mutant) -> Mutant:
    """It breaks a SHOULD of a case that has a MUST."""
    return replace(mutant, strength=Strength.SHOULD)


def noted(mutant: Mutant) -> Mutant:
    """It differs in what CSI leaves open, in a case that has a stronger clause."""
    return replace(mutant, strength=Strength.BEYOND)


def _honest(_method: str, _request: Any, answer: Any) -> Any:
    return answer


def wrong_code(number: int, method: str, code: Code) -> Mutant:
    """A refusal with another code than the specification's."""

    def twist(called: str, _request: Any, answer: Any) -> Any:
        hit = called == method and isinstance(answer, Refused) and answer.code is code
        return Refused(Code.INTERNAL, "something is wrong") if hit else answer

    return Mutant(_name(number), f"{method}-{code.name}-is-INTERNAL", lambda: twist)


def not_refused(number: int, method: str, code: Code) -> Mutant:
    """An empty answer where the specification wants a refusal."""
    empty = getattr(csi_pb2, f"{method}Response")

    def twist(called: str, _request: Any, answer: Any) -> Any:
        hit = called == method and isinstance(answer, Refused) and answer.code is code
        return empty() if hit else answer

    return Mutant(_name(number), f"{method}-{code.name}-is-OK", lambda: twist)


def altered(number: int, method: str, change: Callable[[Any], object], name: str) -> Mutant:
    """An answer with one change."""

    def twist(called: str, _request: Any, answer: Any) -> Any:
        if called == method and not isinstance(answer, Refused):
            change(answer)
        return answer

    return Mutant(_name(number), f"{method}-{name}", lambda: twist)


def refused(
    number: int, method: str, when: Callable[[Any], bool], code: Code = Code.NOT_FOUND
) -> Mutant:
    """A refusal where the specification wants OK."""

    def twist(called: str, request: Any, answer: Any) -> Any:
        return Refused(code, "no") if called == method and when(request) else answer

    return Mutant(_name(number), f"{method}-refused", lambda: twist)


def faulty(number: int, *faults: str) -> Mutant:
    """A driver whose own code is wrong."""
    return Mutant(_name(number), "-".join(faults), faults=faults)


def repeats_secrets(number: int) -> Mutant:
    """A refusal that repeats what was sent."""

    def twist(_called: str, request: Any, answer: Any) -> Any:
        return Refused(answer.code, f"bad: {request}") if isinstance(answer, Refused) else answer

    return Mutant(_name(number), "refusals-repeat-requests", lambda: twist)


def _name(number: int) -> str:
    return f"C-{number:03d}"


def _says(number: int, message: str, details: bytes, name: str) -> Mutant:
    def twist(_called: str, _request: Any, answer: Any) -> Any:
        if not isinstance(answer, Refused):
            return answer
        return Refused(answer.code, message, details)

    return Mutant(_name(number), name, lambda: twist)


def _every_other(number: int, method: str) -> Mutant:
    def start() -> Twist:
        calls = count()

        def twist(called: str, _request: Any, answer: Any) -> Any:
            return Refused(Code.ABORTED, "busy") if called == method and next(calls) % 2 else answer

        return twist

    return Mutant(_name(number), f"{method}-one-at-a-time", start)


def _fails(_: Any) -> Any:
    return Refused(Code.INTERNAL, "not now")


def _one_less(answer: Any) -> Any:
    answer.capabilities.pop()
    return answer


def _remove(answer: Any, rpc: int) -> None:
    kept = [each for each in answer.capabilities if each.rpc.type != rpc]
    del answer.capabilities[:]
    answer.capabilities.extend(kept)


def _every_other_call(method: str, change: Callable[[Any], Any]) -> Twist:
    calls = count()

    def twist(called: str, _request: Any, answer: Any) -> Any:
        return change(answer) if called == method and next(calls) % 2 else answer

    return twist


def _context_changes() -> Twist:
    calls = count()

    def twist(called: str, _request: Any, answer: Any) -> Any:
        if called == "CreateVolume" and not isinstance(answer, Refused):
            answer.volume.volume_context["number"] = str(next(calls))
        return answer

    return twist


def _never_free_again() -> Twist:
    full = []

    def twist(called: str, _request: Any, answer: Any) -> Any:
        if called != "ControllerPublishVolume":
            return answer
        if isinstance(answer, Refused) and answer.code is Code.RESOURCE_EXHAUSTED:
            full.append(answer)
        return full[0] if full else answer

    return twist


def _new_each_time(method: str) -> Twist:
    calls = count()

    def twist(called: str, _request: Any, answer: Any) -> Any:
        if called != method or isinstance(answer, Refused):
            return answer
        changed = type(answer)()
        changed.CopyFrom(answer)
        changed.snapshot.snapshot_id += f"-{next(calls)}"
        return changed

    return twist


def _refuses_the_retry(method: str) -> Twist:
    calls = count()

    def twist(called: str, _request: Any, answer: Any) -> Any:
        again = called == method and next(calls) > 0
        return Refused(Code.INTERNAL, "done already") if again else answer

    return twist


def _mode_of(request: Any) -> int:
    return (
        int(request.volume_capabilities[0].access_mode.mode) if request.volume_capabilities else 0
    )


def _unknown(request: Any) -> bool:
    return str(request.volume_id).startswith("conformance")


_TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"
_Node = csi_pb2.NodeServiceCapability
_Plugin = csi_pb2.PluginCapability
_CONDITION = _Node(rpc=_Node.RPC(type=_Node.RPC.VOLUME_CONDITION))
_DEGRADED = csi_pb2.VolumeHealth.VolumeHealthEntry(status=csi_pb2.DEGRADED, reason="r", message="m")
_BACKEND = csi_pb2.NodeGetStorageHealthResponse.StorageBackendHealth(message="nothing")
INVALID, GONE, EXISTS = Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS
UNREADY, RANGE = Code.FAILED_PRECONDITION, Code.OUT_OF_RANGE

IDENTITY = (
    altered(1, "GetPluginInfo", lambda a: setattr(a, "name", "-odd name-"), "odd-name"),
    altered(1, "GetPluginInfo", lambda a: a.ClearField("vendor_version"), "no-version"),
    Mutant("C-002", "fails-now-and-then", lambda: _every_other_call("Probe", _fails)),
    noted(altered(2, "Probe", lambda a: setattr(a.ready, "value", False), "not-ready")),
    Mutant("C-003", "changes", lambda: _every_other_call("GetPluginCapabilities", _one_less)),
    noted(
        altered(
            3, "ControllerGetCapabilities", lambda a: a.capabilities.append(a.capabilities[0]), "x2"
        )
    ),
    noted(
        altered(3, "GetPluginCapabilities", lambda a: a.capabilities.append(_Plugin()), "typeless")
    ),
    altered(4, "GetPluginCapabilities", lambda a: a.capabilities.pop(0), "no-controller"),
    altered(5, "ControllerGetCapabilities", lambda a: a.capabilities.pop(2), "unadvertised"),
    altered(6, "NodeGetCapabilities", lambda a: a.capabilities.append(_CONDITION), "of-1.12"),
    faulty(7, "defers-to-all"),
    altered(8, "NodeGetInfo", lambda a: a.ClearField("node_id"), "no-id"),
    altered(8, "NodeGetInfo", lambda a: setattr(a, "node_id", "n" * 257), "long-id"),
    altered(
        9,
        "NodeGetInfo",
        lambda a: a.accessible_topology.segments.update({"crust.dev/Node": "b"}),
        "a-key-twice",
    ),
    noted(altered(9, "NodeGetInfo", lambda a: a.ClearField("accessible_topology"), "no-topology")),
    faulty(10, "lock-beside-socket"),
    altered(11, "NodeGetID", lambda a: setattr(a, "node_id", "another"), "other-id"),
    wrong_code(12, "ControllerGetNodeInfo", GONE),
    not_refused(12, "ControllerGetNodeInfo", INVALID),
    altered(
        12, "ControllerGetNodeInfo", lambda a: setattr(a, "max_volumes_per_node", 1), "other-limit"
    ),
    altered(13, "ControllerGetNodeInfo", lambda a: a.ClearField("published_volume_ids"), "none"),
    altered(
        13,
        "ControllerGetNodeInfo",
        lambda a: a.published_volume_ids.extend(a.published_volume_ids),
        "twice",
    ),
    not_refused(14, "ControllerGetNodeInfo", INVALID),
    altered(
        15,
        "ControllerGetCapabilities",
        lambda a: _remove(a, csi_pb2.ControllerServiceCapability.RPC.GET_NODE_INFO),
        "no-node-info",
    ),
    altered(
        16, "ControllerGetNodeInfo", lambda a: a.ClearField("published_volume_ids"), "none-on-full"
    ),
    faulty(17, "counts-all"),
    wrong_code(21, "DeleteSnapshot", INVALID),
    wrong_code(21, "NodeUnpublishVolume", INVALID),
    wrong_code(21, "GetMetadataDelta", GONE),
    not_refused(22, "CreateSnapshot", INVALID),
    not_refused(22, "CreateVolumeGroupSnapshot", INVALID),
    not_refused(22, "GetCapacity", INVALID),
    not_refused(23, "NodePublishVolume", INVALID),
    refused(23, "NodePublishVolume", lambda r: _TOKENS in r.volume_context, INVALID),
    not_refused(24, "CreateVolume", INVALID),
    not_refused(24, "NodePublishVolume", INVALID),
    not_refused(25, "NodePublishVolume", INVALID),
)

CREATING = (
    wrong_code(101, "CreateVolume", INVALID),
    not_refused(101, "CreateVolume", INVALID),
    _says(101, "", b"", "refusals-without-a-message"),
    _says(101, "no", b"details", "refusals-with-details"),
    altered(102, "CreateVolume", lambda a: setattr(a.volume, "capacity_bytes", 1), "too-small"),
    altered(102, "CreateVolume", lambda a: setattr(a.volume, "volume_id", "v" * 129), "long-id"),
    altered(102, "CreateVolume", lambda a: a.volume.volume_context.update(a="x" * 4096), "big-map"),
    faulty(103, "never-idempotent"),
    wrong_code(104, "CreateVolume", EXISTS),
    not_refused(104, "CreateVolume", EXISTS),
    not_refused(105, "CreateVolume", INVALID),
    faulty(106, "no-sidecars"),
    refused(107, "CreateVolume", lambda r: len(r.name.encode()) > 127, INVALID),
    noted(not_refused(107, "CreateVolume", INVALID)),
    faulty(108, "slash-is-underscore"),
    refused(108, "CreateVolume", lambda r: not r.name.isascii(), INVALID),
    not_refused(109, "CreateVolume", INVALID),
    not_refused(110, "CreateVolume", INVALID),
    wrong_code(111, "CreateVolume", RANGE),
    faulty(111, "keeps-failed"),
    refused(112, "DeleteVolume", _unknown),
    not_refused(112, "DeleteVolume", INVALID),
    faulty(113, "delete-is-nothing"),
    faulty(114, "deletes-in-use"),
    noted(not_refused(114, "DeleteVolume", UNREADY)),
    wrong_code(115, "CreateVolume", EXISTS),
    faulty(115, "forgets-usage"),
    faulty(116, "rounds-down"),
    altered(116, "CreateVolume", lambda a: setattr(a.volume, "capacity_bytes", 1 << 40), "huge"),
    Mutant("C-117", "context-changes", lambda: _context_changes()),
    not_refused(121, "ValidateVolumeCapabilities", GONE),
    not_refused(121, "ValidateVolumeCapabilities", INVALID),
    altered(122, "ValidateVolumeCapabilities", lambda a: a.ClearField("confirmed"), "never"),
    altered(123, "ValidateVolumeCapabilities", lambda a: a.confirmed.SetInParent(), "always"),
    faulty(124, "confirms-the-first"),
    noted(
        altered(124, "ValidateVolumeCapabilities", lambda a: a.ClearField("message"), "no-message")
    ),
    faulty(125, "a-mode-is-lost"),
    refused(125, "CreateVolume", lambda r: _mode_of(r) == 5, Code.INTERNAL),
)

PLACING = (
    altered(
        151,
        "CreateVolume",
        lambda a: a.volume.accessible_topology[0].segments.update(other="b"),
        "another-key",
    ),
    altered(
        152,
        "CreateVolume",
        lambda a: a.volume.accessible_topology[0].segments.update({"crust.dev/node": "b"}),
        "elsewhere",
    ),
    faulty(153, "any-topology"),
    wrong_code(153, "CreateVolume", Code.RESOURCE_EXHAUSTED),
    wrong_code(154, "CreateVolume", INVALID),
    refused(155, "CreateVolume", lambda r: len(r.accessibility_requirements.requisite) > 1),
    faulty(156, "any-topology"),
    wrong_code(156, "CreateVolume", EXISTS),
    altered(
        157,
        "ListVolumes",
        lambda a: [each.volume.ClearField("accessible_topology") for each in a.entries],
        "nowhere",
    ),
    faulty(158, "any-topology"),
    altered(
        158,
        "CreateSnapshot",
        lambda a: a.snapshot.accessible_topology[0].segments.update(other="b"),
        "another-key",
    ),
    faulty(143, "any-topology"),
)

LISTING = (
    altered(131, "ListVolumes", lambda a: a.entries.pop(), "one-less"),
    faulty(131, "delete-is-nothing"),
    wrong_code(132, "ListVolumes", Code.ABORTED),
    noted(not_refused(132, "ListVolumes", INVALID)),
    altered(133, "ListVolumes", lambda a: a.entries.append(a.entries[0]), "one-twice"),
    altered(133, "ListVolumes", lambda a: a.ClearField("next_token"), "one-page-only"),
    faulty(134, "token-is-index"),
    altered(
        135,
        "ListVolumes",
        lambda a: [each.status.ClearField("published_node_ids") for each in a.entries],
        "nowhere",
    ),
    wrong_code(136, "ControllerGetVolume", GONE),
    faulty(137, "lists-ephemeral"),
    altered(136, "ControllerGetVolume", lambda a: setattr(a.volume, "capacity_bytes", 1), "size"),
    altered(141, "GetCapacity", lambda a: setattr(a, "available_capacity", -1), "negative"),
    wrong_code(142, "CreateVolume", RANGE),
    noted(altered(142, "GetCapacity", lambda a: setattr(a, "available_capacity", 1), "too-little")),
    noted(
        altered(
            145,
            "ControllerGetVolumeHealth",
            lambda a: a.volume_health.health_statuses.append(_DEGRADED),
            "always-degraded",
        )
    ),
    wrong_code(145, "ControllerGetVolumeHealth", GONE),
    wrong_code(146, "ControllerListVolumeHealth", Code.ABORTED),
)

ATTACHING = (
    wrong_code(161, "ControllerPublishVolume", GONE),
    not_refused(161, "ControllerPublishVolume", INVALID),
    warned(refused(162, "ControllerUnpublishVolume", _unknown)),
    not_refused(162, "ControllerUnpublishVolume", INVALID),
    not_refused(163, "ControllerPublishVolume", EXISTS),
    faulty(164, "detach-needs-node"),
    not_refused(165, "ControllerPublishVolume", UNREADY),
    warned(_says(165, "it is elsewhere", b"", "does-not-name-the-node")),
    noted(not_refused(166, "ControllerPublishVolume", Code.RESOURCE_EXHAUSTED)),
    wrong_code(166, "ControllerPublishVolume", Code.RESOURCE_EXHAUSTED),
    Mutant("C-166", "never-free-again", lambda: _never_free_again()),
    not_refused(167, "ControllerPublishVolume", EXISTS),
    faulty(168, "attached-readonly-is-writable"),
    wrong_code(171, "ControllerExpandVolume", GONE),
    not_refused(171, "ControllerExpandVolume", INVALID),
    faulty(172, "shrinks"),
    not_refused(173, "ControllerExpandVolume", RANGE),
    altered(
        174,
        "ControllerExpandVolume",
        lambda a: setattr(a, "node_expansion_required", True),
        "always-on-the-node",
    ),
    not_refused(175, "ControllerExpandVolume", INVALID),
    wrong_code(175, "ControllerExpandVolume", INVALID),
    Mutant(
        "C-176",
        "grows-in-use",
        not_refused(176, "ControllerExpandVolume", UNREADY).twist,
        offline=True,
    ),
    not_refused(181, "ControllerModifyVolume", INVALID),
    not_refused(182, "ControllerModifyVolume", INVALID),
    noted(not_refused(183, "CreateVolume", INVALID)),
    refused(183, "CreateVolume", lambda r: len(r.mutable_parameters) == 1, INVALID),
    faulty(184, "no-sidecars"),
    refused(185, "ControllerModifyVolume", lambda r: True, UNREADY),
    refused(186, "ControllerModifyVolume", lambda r: True, Code.INTERNAL),
    refused(187, "ControllerExpandVolume", lambda r: True, Code.INTERNAL),
    altered(
        187,
        "ControllerExpandVolume",
        lambda a: setattr(a, "capacity_bytes", a.capacity_bytes // 2),
        "as-it-was",
    ),
)

PUBLISHING = (
    wrong_code(201, "NodeStageVolume", GONE),
    not_refused(201, "NodeStageVolume", INVALID),
    refused(202, "NodeUnstageVolume", _unknown, Code.INTERNAL),
    not_refused(203, "NodeUnstageVolume", INVALID),
    not_refused(204, "NodeStageVolume", EXISTS),
    faulty(204, "restage-unstages"),
    faulty(205, "format-second-path"),
    wrong_code(206, "NodeStageVolume", UNREADY),
    not_refused(206, "NodeStageVolume", UNREADY),
    wrong_code(211, "NodePublishVolume", GONE),
    not_refused(211, "NodePublishVolume", INVALID),
    not_refused(212, "NodePublishVolume", UNREADY),
    faulty(213, "format-again"),
    faulty(214, "format-again"),
    faulty(214, "block-is-a-file"),
    faulty(215, "mounts-again"),
    not_refused(216, "NodePublishVolume", EXISTS),
    faulty(217, "strict-context"),
    not_refused(218, "NodePublishVolume", UNREADY),
    not_refused(219, "NodePublishVolume", UNREADY),
    faulty(220, "unpublish-forgets-all"),
    faulty(221, "target-stays"),
    refused(221, "NodeUnpublishVolume", _unknown, Code.INTERNAL),
    not_refused(222, "NodeUnpublishVolume", INVALID),
    faulty(223, "readonly-is-writable"),
    faulty(223, "readonly-for-ever"),
    refused(224, "NodePublishVolume", lambda r: len(r.target_path) > 127, INVALID),
    warned(faulty(224, "short-paths")),
    faulty(225, "unstage-rips"),
    faulty(226, "no-group"),
    faulty(227, "ephemeral-stays"),
    wrong_code(228, "NodePublishVolume", UNREADY),
    not_refused(228, "NodePublishVolume", UNREADY),
    not_refused(229, "NodePublishVolume", EXISTS),
    faulty(229, "republish-unmounts"),
    not_refused(230, "NodePublishVolume", EXISTS),
    not_refused(231, "NodePublishVolume", UNREADY),
    faulty(232, "readonly-is-writable"),
    warned(faulty(232, "never-shares")),
    faulty(232, "readonly-is-for-all"),
    warned(faulty(233, "never-shares")),
    faulty(233, "unpublish-forgets-all"),
    not_refused(234, "NodePublishVolume", UNREADY),
    faulty(235, "never-shares"),
    not_refused(235, "NodePublishVolume", EXISTS),
    faulty(237, "readers-write"),
    faulty(238, "ro-is-writable"),
    wrong_code(241, "NodeGetVolumeStats", GONE),
    not_refused(241, "NodeGetVolumeStats", INVALID),
    altered(242, "NodeGetVolumeStats", lambda a: setattr(a.usage[0], "used", -1), "negative"),
    noted(faulty(242, "constant-stats")),
    altered(243, "NodeGetVolumeStats", lambda a: setattr(a.usage[0], "total", 1), "wrong-size"),
    Mutant(
        "C-244",
        "no-condition",
        altered(244, "NodeGetVolumeStats", lambda a: a.ClearField("volume_condition"), "").twist,
        profile="1.12",
    ),
    wrong_code(251, "NodeExpandVolume", GONE),
    not_refused(251, "NodeExpandVolume", INVALID),
    faulty(252, "never-grows"),
    faulty(252, "grow-loses"),
    faulty(253, "device-stays"),
    faulty(254, "never-grows"),
    wrong_code(255, "NodeExpandVolume", GONE),
    not_refused(255, "NodeExpandVolume", RANGE),
    not_refused(255, "NodeExpandVolume", INVALID),
    wrong_code(261, "NodeGetVolumeHealth", GONE),
    altered(
        262, "NodeGetStorageHealth", lambda a: a.backend_health.append(_BACKEND), "says-nothing"
    ),
)

COPYING = (
    noted(wrong_code(301, "CreateSnapshot", GONE)),
    not_refused(301, "CreateSnapshot", INVALID),
    not_refused(302, "CreateSnapshot", EXISTS),
    not_refused(303, "DeleteSnapshot", INVALID),
    refused(304, "CreateSnapshot", lambda r: not r.name.isascii(), INVALID),
    noted(not_refused(304, "CreateSnapshot", INVALID)),
    faulty(305, "snapshot-shares"),
    faulty(305, "restore-empty"),
    faulty(306, "restore-torn"),
    faulty(306, "snapshot-shares"),
    faulty(307, "never-grows"),
    wrong_code(307, "CreateVolume", RANGE),
    wrong_code(308, "CreateVolume", GONE),
    faulty(309, "snapshots-die"),
    not_refused(310, "CreateVolume", EXISTS),
    faulty(311, "clone-shares"),
    faulty(313, "restores-die"),
    wrong_code(314, "CreateVolume", RANGE),
    faulty(314, "never-grows"),
    faulty(315, "clone-torn"),
    faulty(315, "clone-shares"),
    faulty(316, "clones-die"),
    wrong_code(312, "CreateVolume", GONE),
    wrong_code(312, "CreateVolume", RANGE),
    altered(321, "ListSnapshots", lambda a: a.ClearField("entries"), "empty"),
    noted(faulty(322, "token-is-index")),
    wrong_code(322, "ListSnapshots", Code.ABORTED),
    wrong_code(323, "GetSnapshot", GONE),
    not_refused(341, "CreateVolumeGroupSnapshot", INVALID),
    noted(wrong_code(341, "CreateVolumeGroupSnapshot", GONE)),
    not_refused(342, "CreateVolumeGroupSnapshot", EXISTS),
    altered(
        342, "CreateVolumeGroupSnapshot", lambda a: a.group_snapshot.snapshots.pop(), "one-less"
    ),
    not_refused(343, "GetVolumeGroupSnapshot", INVALID),
    wrong_code(344, "DeleteSnapshot", INVALID),
    not_refused(345, "DeleteVolumeGroupSnapshot", INVALID),
    faulty(346, "group-out-of-order"),
    faulty(361, "misses-blocks"),
    faulty(361, "ignores-max-results"),
    faulty(361, "blocks-descend"),
    faulty(361, "fixed-lengths-differ"),
    faulty(362, "misses-blocks"),
    noted(faulty(362, "delta-is-everything")),
    faulty(363, "offset-ignored"),
    wrong_code(364, "GetMetadataAllocated", GONE),
    wrong_code(364, "GetMetadataDelta", INVALID),
    faulty(365, "empty-is-an-error"),
    wrong_code(366, "GetMetadataDelta", RANGE),
    wrong_code(366, "GetMetadataDelta", INVALID),
)

TROUBLE = (
    faulty(401, "never-idempotent"),
    warned(faulty(401, "races-CreateVolume")),
    _every_other(402, "CreateVolume"),
    faulty(403, "mounts-again"),
    warned(faulty(403, "races-NodePublishVolume")),
    warned(faulty(403, "races-NodeUnpublishVolume")),
    refused(404, "DeleteVolume", lambda r: not _unknown(r), Code.INTERNAL),
    faulty(405, "mounts-again"),
    Mutant("C-406", "refuses-the-retry", lambda: _refuses_the_retry("ControllerPublishVolume")),
    warned(faulty(406, "races-ControllerPublishVolume")),
    warned(faulty(406, "races-ControllerUnpublishVolume")),
    Mutant("C-407", "refuses-the-retry", lambda: _refuses_the_retry("NodeStageVolume")),
    warned(faulty(407, "races-NodeStageVolume")),
    warned(faulty(407, "races-NodeUnstageVolume")),
    Mutant("C-408", "refuses-the-retry", lambda: _refuses_the_retry("CreateSnapshot")),
    warned(faulty(408, "races-CreateSnapshot")),
    warned(faulty(408, "races-DeleteSnapshot")),
    Mutant("C-409", "refuses-the-retry", lambda: _refuses_the_retry("CreateVolumeGroupSnapshot")),
    warned(faulty(409, "races-CreateVolumeGroupSnapshot")),
    warned(faulty(409, "races-DeleteVolumeGroupSnapshot")),
    Mutant("C-410", "refuses-the-retry", lambda: _refuses_the_retry("ControllerExpandVolume")),
    warned(faulty(410, "races-ControllerExpandVolume")),
    warned(faulty(411, "races-NodeExpandVolume")),
    faulty(411, "grow-loses"),
    Mutant("C-412", "refuses-the-retry", lambda: _refuses_the_retry("DeleteVolume")),
    warned(faulty(412, "races-DeleteVolume")),
    Mutant("C-413", "a-snapshot-each-time", lambda: _new_each_time("CreateSnapshot")),
    faulty(413, "snapshots-freeze"),
    Mutant("C-414", "refuses-the-retry", lambda: _refuses_the_retry("ControllerExpandVolume")),
    Mutant("C-415", "refuses-the-retry", lambda: _refuses_the_retry("NodeUnpublishVolume")),
    faulty(415, "target-stays"),
    refused(416, "ControllerExpandVolume", lambda _: True, UNREADY),
    faulty(416, "restore-empty"),
    faulty(501, "defer-mounts"),
    altered(501, "NodePublishVolume", lambda a: a.ClearField("deferred_mount"), "returns-nothing"),
    not_refused(502, "NodePublishVolume", EXISTS),
    refused(503, "NodeUnpublishVolume", lambda _: True, UNREADY),
    faulty(601, "logs-requests"),
    faulty(602, "logs-requests"),
    repeats_secrets(602),
    faulty(701, "restart-forgets"),
    faulty(702, "restart-forgets"),
    faulty(703, "restart-freezes"),
    faulty(704, "restart-loses-snapshots"),
    faulty(704, "restore-empty"),
    faulty(705, "restart-freezes"),
    faulty(705, "clone-shares"),
    faulty(706, "restart-forgets"),
    faulty(706, "never-grows"),
    faulty(706, "grow-loses"),
    faulty(707, "restart-freezes"),
    faulty(707, "restart-loses-snapshots"),
    faulty(708, "target-stays"),
    faulty(708, "delete-is-nothing"),
)

ALL = (*IDENTITY, *CREATING, *PLACING, *LISTING, *ATTACHING, *PUBLISHING, *COPYING, *TROUBLE)
