"""Drivers that break one rule each of identity, creation, placement and lists, and the case that must fail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.fake_driver import Code, Failure
from tests.support.mutants.mutant import (
    EXISTS,
    GONE,
    INVALID,
    RANGE,
    UNREADY,
    Mutant,
    altered,
    by_call,
    faulty,
    not_refused,
    noted,
    refused,
    says,
    unknown,
    wrong_code,
)

_TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"
_Node = csi_pb2.NodeServiceCapability
_Rpc = csi_pb2.ControllerServiceCapability.RPC
_Plugin = csi_pb2.PluginCapability
_CONDITION = _Node(rpc=_Node.RPC(type=_Node.RPC.VOLUME_CONDITION))
_DEGRADED = csi_pb2.VolumeHealth.VolumeHealthEntry(status=csi_pb2.DEGRADED, reason="r", message="m")

_FAILED = Failure(Code.INTERNAL, "not now")


def _remove(answer: Any, rpc: int) -> None:
    kept = [capability for capability in answer.capabilities if capability.rpc.type != rpc]
    del answer.capabilities[:]
    answer.capabilities.extend(kept)


def _fewer(before: int, answer: Any) -> Any:
    if before % 2:
        answer.capabilities.pop()
    return answer


def _with_number(before: int, answer: Any) -> Any:
    if not isinstance(answer, Failure):
        answer.volume.volume_context["number"] = str(before)
    return answer


def _change_status(answer: Any, change: Callable[[Any], None]) -> None:
    for entry in answer.entries:
        change(entry.status)


def _without_condition(status: Any) -> None:
    status.ClearField("volume_condition")


def _without_message(status: Any) -> None:
    status.volume_condition.ClearField("message")


def _abnormal(status: Any) -> None:
    status.volume_condition.abnormal = True


def _mode_of(request: Any) -> int:
    return (
        int(request.volume_capabilities[0].access_mode.mode) if request.volume_capabilities else 0
    )


IDENTITY = (
    altered(1, "GetPluginInfo", lambda a: setattr(a, "name", "-odd name-"), "odd-name"),
    altered(1, "GetPluginInfo", lambda a: a.ClearField("vendor_version"), "no-version"),
    Mutant("C-002", "fails-now-and-then", by_call("Probe", lambda n, a: _FAILED if n % 2 else a)),
    noted(altered(2, "Probe", lambda a: setattr(a.ready, "value", False), "not-ready")),
    Mutant("C-003", "changes", by_call("GetPluginCapabilities", _fewer)),
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
        # a copy: extended by itself, a field grows as long as there is memory
        lambda a: a.published_volume_ids.extend([*a.published_volume_ids]),
        "twice",
    ),
    not_refused(14, "ControllerGetNodeInfo", INVALID),
    altered(
        15,
        "ControllerGetCapabilities",
        lambda a: _remove(a, _Rpc.GET_NODE_INFO),
        "no-node-info",
    ),
    altered(
        16, "ControllerGetNodeInfo", lambda a: a.ClearField("published_volume_ids"), "none-on-full"
    ),
    faulty(17, "counts-all"),
    replace(
        altered(
            18,
            "ControllerGetCapabilities",
            lambda a: _remove(a, _Rpc.EXPAND_VOLUME),
            "expands-nowhere",
        ),
        offline=True,
    ),
    altered(
        18,
        "ControllerGetCapabilities",
        lambda a: _remove(a, _Rpc.PUBLISH_UNPUBLISH_VOLUME),
        "lists-nodes-alone",
    ),
    altered(18, "GetPluginCapabilities", lambda a: a.capabilities.pop(1), "topology-alone"),
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

_LISTED, _GOT = "ListVolumes", "ControllerGetVolume"
_CONDITIONS = tuple(
    replace(mutant, profile="1.12")
    for mutant in (
        altered(138, _LISTED, lambda a: _change_status(a, _without_condition), "no-condition"),
        altered(138, _LISTED, lambda a: _change_status(a, _without_message), "no-message"),
        noted(altered(138, _LISTED, lambda a: _change_status(a, _abnormal), "abnormal")),
        altered(139, _GOT, lambda a: _without_condition(a.status), "no-condition"),
        altered(139, _GOT, lambda a: _without_message(a.status), "no-message"),
        noted(altered(139, _GOT, lambda a: _abnormal(a.status), "abnormal")),
    )
)

CREATING = (
    wrong_code(101, "CreateVolume", INVALID),
    not_refused(101, "CreateVolume", INVALID),
    says(101, "", b"", "refusals-without-a-message"),
    says(101, "no", b"details", "refusals-with-details"),
    altered(102, "CreateVolume", lambda a: setattr(a.volume, "capacity_bytes", 1), "too-small"),
    altered(102, "CreateVolume", lambda a: setattr(a.volume, "volume_id", "v" * 129), "long-id"),
    altered(102, "CreateVolume", lambda a: a.volume.volume_context.update(a="x" * 4096), "big-map"),
    altered(102, "GetPluginCapabilities", lambda a: a.capabilities.pop(1), "topology-alone"),
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
    refused(112, "DeleteVolume", unknown),
    not_refused(112, "DeleteVolume", INVALID),
    faulty(113, "delete-is-nothing"),
    faulty(114, "deletes-in-use"),
    noted(not_refused(114, "DeleteVolume", UNREADY)),
    wrong_code(115, "CreateVolume", EXISTS),
    faulty(115, "forgets-usage"),
    faulty(116, "rounds-down"),
    altered(116, "CreateVolume", lambda a: setattr(a.volume, "capacity_bytes", 1 << 40), "huge"),
    Mutant("C-117", "context-changes", by_call("CreateVolume", _with_number)),
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
        lambda a: [entry.volume.ClearField("accessible_topology") for entry in a.entries],
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
        lambda a: [entry.status.ClearField("published_node_ids") for entry in a.entries],
        "nowhere",
    ),
    wrong_code(136, "ControllerGetVolume", GONE),
    altered(136, "ControllerGetVolume", lambda a: a.ClearField("status"), "nowhere"),
    faulty(137, "lists-ephemeral"),
    *_CONDITIONS,
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

ALL = (*IDENTITY, *CREATING, *PLACING, *LISTING)
