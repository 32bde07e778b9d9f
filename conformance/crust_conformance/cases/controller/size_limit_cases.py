"""Size limits of a CO's requests, in every RPC that has the field (C-021 to C-025)."""

import copy
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator import copies
from crust_conformance.orchestrator.calls import Code, check_code
from crust_conformance.orchestrator.capabilities import (
    CAPACITY,
    CREATE,
    GROUP,
    NODE,
    PUBLISH,
    SNAPSHOT,
    STAGE,
)
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.optional_rpcs import RPCS

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


def test_c021_odd_ids_are_refused_or_not_found(co: Co) -> None:
    for rpc in (rpc for rpc in RPCS if rpc.needs in co.has):
        for field in _ID_FIELDS:
            if field not in rpc.request.DESCRIPTOR.fields_by_name:
                continue
            for odd in _ODD_IDS:
                request = _with(co, rpc.request, field, odd)
                code, _ = co.outcome(request)
                check_code(request, code, *_NOT_THERE, asked=f" with an odd {field}")


def test_c022_every_map_of_parameters_has_at_most_4_kib(co: Co) -> None:
    volume_id = co.volume().volume_id
    _refused_full(
        co,
        "parameters",
        "csi.storage.k8s.io/volumesnapshot/",
        (SNAPSHOT, copies.snapshot_request(co, volume_id)),
        (GROUP, copies.group_request(co, [volume_id])),
        (CAPACITY, csi_pb2.GetCapacityRequest()),
    )


def test_c023_every_context_has_at_most_4_kib(co: Co) -> None:
    volume, target = co.staged()
    for field in ("volume_context", "publish_context"):
        request = co.publish_request(volume, target)
        _fill(getattr(request, field), "conformance-")
        co.answered(request, Code.INVALID_ARGUMENT)
    assert not co.host.mounts_at(target)
    request = co.publish_request(volume, target)
    request.volume_context["csi.storage.k8s.io/serviceAccount.tokens"] = "t" * 6000
    co.ask(request)


def test_c024_every_map_of_secrets_has_at_most_4_kib(co: Co) -> None:
    volume, target = co.staged()
    _refused_full(
        co,
        "secrets",
        "conformance-",
        (CREATE, co.create_request()),
        (CREATE, csi_pb2.DeleteVolumeRequest(volume_id="none")),
        (PUBLISH, co.attach_request(volume)),
        (SNAPSHOT, copies.snapshot_request(co, volume.volume_id)),
        (STAGE, co.stage_request(volume)),
        (NODE, co.publish_request(volume, target)),
    )
    assert not co.host.mounts_at(target)


def test_c025_mount_flags_have_at_most_4_kib(co: Co) -> None:
    volume, target = co.staged()
    request = co.publish_request(volume, target)
    request.volume_capability.mount.mount_flags.extend(["noatime"] * 700)
    co.answered(request, Code.INVALID_ARGUMENT)
    assert not co.host.mounts_at(target)


def _with(co: Co, request: Any, field: str, value: str) -> Any:
    """The request with an odd id, and the CO's own paths."""
    changed = copy.deepcopy(request)
    for path_field in set(_PATH_FIELDS) & set(request.DESCRIPTOR.fields_by_name):
        setattr(changed, path_field, str(co.root / "none"))
    setattr(changed, field, value)
    return changed


def _refused_full(co: Co, field: str, prefix: str, *requests: tuple[str, Any]) -> None:
    """Each request whose capability the driver has must be refused with an oversized map."""
    for needs, request in requests:
        if needs in co.has:
            _fill(getattr(request, field), prefix)
            co.answered(request, Code.INVALID_ARGUMENT)


def _fill(values: Any, prefix: str) -> None:
    for number in range(_MANY):
        values[f"{prefix}{number}"] = _LONG
