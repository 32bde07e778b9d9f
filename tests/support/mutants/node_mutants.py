"""Drivers that break one rule each of attach, publish and copies, or in trouble, and the case that must fail."""

from typing import Any

from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.fake_driver import Code, Failure, Twist
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
    refuses_the_retry,
    says,
    unknown,
    warned,
    wrong_code,
)

_BUSY = Failure(Code.ABORTED, "busy")
_NO = Failure(UNREADY, "no")
"""Once: the cleaning up of the case, whose clause is another one, succeeds."""
_BACKEND = csi_pb2.NodeGetStorageHealthResponse.StorageBackendHealth(message="nothing")


def _never_free_again() -> Twist:
    full = []

    def twist(called: str, _request: Any, answer: Any) -> Any:
        if called != "ControllerPublishVolume":
            return answer
        if isinstance(answer, Failure) and answer.code is Code.RESOURCE_EXHAUSTED:
            full.append(answer)
        return full[0] if full else answer

    return twist


def _new_each_time(before: int, answer: Any) -> Any:
    if isinstance(answer, Failure):
        return answer
    changed = type(answer)()
    changed.CopyFrom(answer)
    changed.snapshot.snapshot_id += f"-{before}"
    return changed


def _on_another_device(before: int, answer: Any) -> Any:
    if before and not isinstance(answer, Failure):
        answer.deferred_mount.block_device.path += f"-{before}"
    return answer


ATTACHING = (
    wrong_code(161, "ControllerPublishVolume", GONE),
    not_refused(161, "ControllerPublishVolume", INVALID),
    warned(refused(162, "ControllerUnpublishVolume", unknown)),
    not_refused(162, "ControllerUnpublishVolume", INVALID),
    not_refused(163, "ControllerPublishVolume", EXISTS),
    faulty(164, "detach-needs-node"),
    not_refused(165, "ControllerPublishVolume", UNREADY),
    warned(says(165, "it is elsewhere", b"", "does-not-name-the-node")),
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
    refused(202, "NodeUnstageVolume", unknown, Code.INTERNAL),
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
    refused(221, "NodeUnpublishVolume", unknown, Code.INTERNAL),
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
    altered(302, "GetPluginCapabilities", lambda a: a.capabilities.pop(4), "topology-alone"),
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
    faulty(310, "source-is-open"),
    not_refused(317, "CreateVolume", EXISTS),
    faulty(317, "source-is-open"),
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
    Mutant("C-402", "one-at-a-time", by_call("CreateVolume", lambda n, a: _BUSY if n % 2 else a)),
    faulty(403, "mounts-again"),
    warned(faulty(403, "races-NodePublishVolume")),
    warned(faulty(403, "races-NodeUnpublishVolume")),
    refused(404, "DeleteVolume", lambda r: not unknown(r), Code.INTERNAL),
    faulty(405, "mounts-again"),
    refuses_the_retry(406, "ControllerPublishVolume"),
    warned(faulty(406, "races-ControllerPublishVolume")),
    warned(faulty(406, "races-ControllerUnpublishVolume")),
    refuses_the_retry(407, "NodeStageVolume"),
    warned(faulty(407, "races-NodeStageVolume")),
    warned(faulty(407, "races-NodeUnstageVolume")),
    refuses_the_retry(408, "CreateSnapshot"),
    warned(faulty(408, "races-CreateSnapshot")),
    warned(faulty(408, "races-DeleteSnapshot")),
    refuses_the_retry(409, "CreateVolumeGroupSnapshot"),
    warned(faulty(409, "races-CreateVolumeGroupSnapshot")),
    warned(faulty(409, "races-DeleteVolumeGroupSnapshot")),
    refuses_the_retry(410, "ControllerExpandVolume"),
    warned(faulty(410, "races-ControllerExpandVolume")),
    warned(faulty(411, "races-NodeExpandVolume")),
    faulty(411, "grow-loses"),
    refuses_the_retry(412, "DeleteVolume"),
    warned(faulty(412, "races-DeleteVolume")),
    Mutant("C-413", "a-snapshot-each-time", by_call("CreateSnapshot", _new_each_time)),
    faulty(413, "snapshots-freeze"),
    refuses_the_retry(414, "ControllerExpandVolume"),
    refuses_the_retry(415, "NodeUnpublishVolume"),
    faulty(415, "target-stays"),
    refused(416, "ControllerExpandVolume", lambda _: True, UNREADY),
    faulty(416, "restore-empty"),
    faulty(501, "defer-mounts"),
    altered(501, "NodePublishVolume", lambda a: a.ClearField("deferred_mount"), "returns-nothing"),
    not_refused(502, "NodePublishVolume", EXISTS),
    Mutant(
        "C-503", "refuses-the-first", by_call("NodeUnpublishVolume", lambda n, a: a if n else _NO)
    ),
    altered(
        504,
        "NodePublishVolume",
        lambda a: a.deferred_mount.ClearField("supplemental_group"),
        "no-group",
    ),
    altered(
        504, "NodePublishVolume", lambda a: setattr(a.deferred_mount, "fs_type", "xfs"), "other-fs"
    ),
    not_refused(505, "NodePublishVolume", INVALID),
    wrong_code(505, "NodePublishVolume", INVALID),
    *(faulty(505, fault) for fault in ("any-group", "any-policy", "policy-alone", "two-groups")),
    faulty(601, "logs-requests"),
    faulty(602, "logs-requests"),
    says(602, "bad: {}", b"", "refusals-repeat-requests"),
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
    faulty(709, "restart-forgets"),
    Mutant("C-709", "another-device", by_call("NodePublishVolume", _on_another_device)),
    faulty(707, "restart-loses-snapshots"),
    faulty(708, "target-stays"),
    faulty(708, "delete-is-nothing"),
)

ALL = (*ATTACHING, *PUBLISHING, *COPYING, *TROUBLE)
