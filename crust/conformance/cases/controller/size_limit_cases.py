"""Size limits of what a CO sends, in every RPC that has the field (C-021 to C-025)."""

from collections.abc import Iterator
from typing import Any

from crust.conformance.case import (
    CAPACITY,
    CREATE,
    GROUP,
    NODE,
    PUBLISH,
    SNAPSHOT,
    STAGE,
    beyond,
    case,
)
from crust.conformance.orchestrator import copies
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.optional_rpcs import RPCS, Rpc
from crust.wire.csi.v1 import csi_pb2

_ODD_IDS = ("x" * 129, "../../../etc/passwd", "a/b/../c", "ü" * 64, "a\x07b", "-", ".")
_ID_FIELDS = (
    "volume_id",
    "snapshot_id",
    "source_volume_id",
    "group_snapshot_id",
    "base_snapshot_id",
    "target_snapshot_id",
)
_PATH_FIELDS = ("target_path", "staging_target_path", "volume_path", "volume_publish_path")
_NOT_THERE = (Code.OK, Code.NOT_FOUND, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION)
_MANY = 40
_LONG = "x" * 120


@case(21)
@beyond(
    "Size Limits",
    "strings have at most 128 bytes; CSI does not say what an odd id is answered, if not "
    "that it is unknown",
)
def test_odd_ids_are_refused_or_not_found(co: Co) -> None:
    """Size Limits: an id that is too long, a path, or odd is refused or not found, in every RPC; never
    an internal error.
    """
    for rpc in _advertised(co):
        for field in _ID_FIELDS:
            if field not in rpc.request.DESCRIPTOR.fields_by_name:
                continue
            for odd in _ODD_IDS:
                code = _code(co, rpc, _with(co, rpc.request, field, odd))
                assert code in _NOT_THERE, f"{rpc.request.DESCRIPTOR.name}.{field}: {code.name}"


@case(22, CREATE)
@beyond(
    "Size Limits",
    "a CO's maps have at most 4 KiB; that a plugin refuses larger ones is practice",
)
def test_every_map_of_parameters_has_at_most_4_kib(co: Co) -> None:
    """Size Limits: parameters of more than 4 KiB are INVALID_ARGUMENT for snapshots, groups and GetCapacity."""
    volume_id = co.volume().volume_id
    group = csi_pb2.CreateVolumeGroupSnapshotRequest(
        name=co.name("group"), source_volume_ids=[volume_id]
    )
    calls: list[tuple[str, Any, Any]] = [
        (SNAPSHOT, co.controller.CreateSnapshot, copies.snapshot_request(co, volume_id)),
        (GROUP, co.groups.CreateVolumeGroupSnapshot, group),
        (CAPACITY, co.controller.GetCapacity, csi_pb2.GetCapacityRequest()),
    ]
    for needs, method, request in calls:
        if needs in co.has:
            _fill(request.parameters, "csi.storage.k8s.io/volumesnapshot/")
            co.refused(method, request, Code.INVALID_ARGUMENT)


@case(23, CREATE, NODE)
@beyond(
    "Size Limits",
    "a CO's maps have at most 4 KiB; that a plugin refuses larger ones, and counts no token "
    "of a kubelet, is practice",
)
def test_every_context_has_at_most_4_kib(co: Co) -> None:
    """Size Limits: volume_context and publish_context of more than 4 KiB are INVALID_ARGUMENT; the tokens and
    pods that a kubelet adds are not counted.
    """
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    call = co.node.NodePublishVolume
    for field in ("volume_context", "publish_context"):
        request = co.publish_request(volume, target)
        _fill(getattr(request, field), "conformance-")
        co.refused(call, request, Code.INVALID_ARGUMENT)
    assert not co.host.mounts_at(target)
    request = co.publish_request(volume, target)
    request.volume_context["csi.storage.k8s.io/serviceAccount.tokens"] = "t" * 6000
    co.ask(call, request)


@case(24, CREATE, NODE)
@beyond(
    "Size Limits",
    "a CO's maps have at most 4 KiB; that a plugin refuses larger ones is practice",
)
def test_every_map_of_secrets_has_at_most_4_kib(co: Co) -> None:
    """Size Limits: secrets of more than 4 KiB are INVALID_ARGUMENT, whatever they are used for."""
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    publish = co.publish_request(volume, target)
    calls: list[tuple[str, Any, Any]] = [
        (CREATE, co.controller.CreateVolume, co.create_request()),
        (CREATE, co.controller.DeleteVolume, csi_pb2.DeleteVolumeRequest(volume_id="none")),
        (PUBLISH, co.controller.ControllerPublishVolume, co.attach_request(volume)),
        (SNAPSHOT, co.controller.CreateSnapshot, copies.snapshot_request(co, volume.volume_id)),
        (STAGE, co.node.NodeStageVolume, co.stage_request(volume)),
        (NODE, co.node.NodePublishVolume, publish),
    ]
    for needs, method, request in calls:
        if needs in co.has:
            _fill(request.secrets, "conformance-")
            co.refused(method, request, Code.INVALID_ARGUMENT)
    assert not co.host.mounts_at(target)


@case(25, CREATE, NODE)
@beyond(
    "VolumeCapability",
    "mount_flags SHALL NOT exceed 4 KiB; that a plugin refuses more is practice",
)
def test_mount_flags_have_at_most_4_kib(co: Co) -> None:
    """Size Limits: mount_flags of more than 4 KiB are INVALID_ARGUMENT, and nothing is mounted."""
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    request = co.publish_request(volume, target)
    request.volume_capability.mount.mount_flags.extend(["noatime"] * 700)
    co.refused(co.node.NodePublishVolume, request, Code.INVALID_ARGUMENT)
    assert not co.host.mounts_at(target)


def _advertised(co: Co) -> Iterator[Rpc]:
    return (each for each in RPCS if each.needs in co.has)


def _with(co: Co, request: Any, field: str, value: str) -> Any:
    """With an odd id, and the CO's own paths."""
    changed = type(request)()
    changed.CopyFrom(request)
    for each in set(_PATH_FIELDS) & set(request.DESCRIPTOR.fields_by_name):
        setattr(changed, each, str(co.root / "none"))
    setattr(changed, field, value)
    return changed


def _code(co: Co, rpc: Rpc, request: Any) -> Code:
    if rpc.streams:
        return co.stream_outcome(rpc.method(co), request)[0]
    return co.outcome(rpc.method(co), request)[0]


def _fill(values: Any, prefix: str) -> None:
    for number in range(_MANY):
        values[f"{prefix}{number}"] = _LONG
