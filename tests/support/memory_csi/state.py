"""The fake driver's state, and the rules about requests that several services have."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from crust.wire.csi.v1 import csi_pb2

Code = grpc.StatusCode
MIB = 1 << 20
POOL_BYTES = 1 << 40


NODE = "node-1"
TOPOLOGY = {"crust.dev/node": NODE}
"""The driver's topology."""
SIDECARS = "csi.storage.k8s.io/"
HEALTHY = csi_pb2.VolumeCondition(message="nothing is wrong")
_GROUP_MAX = 4294967294


class Failure(Exception):
    """An answer that is not OK."""

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str,
        trailing: tuple[tuple[str, str | bytes], ...] = (),
    ) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailing = trailing


@dataclass
class Content:
    """What a volume holds: a device's bytes, and a filesystem's files and size."""

    raw: bytearray
    files: dict[str, bytes] = field(default_factory=dict)
    fs_bytes: int = 0

    def copy(self) -> "Content":
        """A copy that is not written."""
        return Content(bytearray(self.raw), dict(self.files), self.fs_bytes)


@dataclass
class Volume:
    """A volume."""

    request: csi_pb2.CreateVolumeRequest
    wire: csi_pb2.Volume
    content: Content
    attached: dict[str, bytes] = field(default_factory=dict)
    readonly: bool = False
    """Attached to be read only."""
    staged: dict[str, bytes] = field(default_factory=dict)
    modified: dict[str, str] = field(default_factory=dict)


@dataclass
class Snapshot:
    """A snapshot."""

    wire: csi_pb2.Snapshot
    name: str
    content: Content


@dataclass
class Published:
    """What is at a target."""

    volume: Volume
    identity: Any
    deferred: bool
    readonly: bool
    capability: bytes = b""
    is_block: bool = False
    group: int = 0
    mounts: int = 1

    @property
    def volume_id(self) -> str:
        return self.volume.wire.volume_id


@dataclass
class State:
    """All of it."""

    volumes: dict[str, Volume] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    groups: dict[str, tuple[csi_pb2.CreateVolumeGroupSnapshotRequest, list[str]]] = field(
        default_factory=dict
    )
    targets: dict[str, Published] = field(default_factory=dict)
    places_snapshots: bool = False
    """Whether a snapshot has a topology, as CSI 1.13 has it."""

    def find(self, volume_id: str) -> Volume:
        """A volume that is known."""
        check_text(volume_id)
        if volume_id not in self.volumes:
            raise Failure(Code.NOT_FOUND, "no such volume")
        return self.volumes[volume_id]

    def is_used(self, volume: Volume) -> bool:
        """Whether it is published at any target."""
        return any(target.volume is volume for target in self.targets.values())


def check_text(value: str, limit: int = 128) -> None:
    """INVALID_ARGUMENT for an empty, a long or an odd string."""
    odd = any((ord(c) < 32 and c not in "\t\n\r") or 127 <= ord(c) <= 159 for c in value)
    if not value or len(value.encode()) > limit or odd:
        raise Failure(Code.INVALID_ARGUMENT, "a string is missing, too long or odd")


def check_capability(
    pb: csi_pb2.VolumeCapability, exceeded: grpc.StatusCode = Code.INVALID_ARGUMENT
) -> None:
    """INVALID_ARGUMENT for a capability that is incomplete; `exceeded` for one that no volume can have."""
    if pb.WhichOneof("access_type") is None or not pb.access_mode.mode:
        raise Failure(Code.INVALID_ARGUMENT, "the capability is incomplete")
    if sum(map(len, pb.mount.mount_flags)) > 4096:
        raise Failure(Code.INVALID_ARGUMENT, "the mount flags are too long")
    if pb.mount.fs_type not in ("", "ext4"):
        raise Failure(exceeded, "no such filesystem")


def check_group(pb: csi_pb2.VolumeCapability.MountVolume, faults: Collection[str]) -> None:
    """INVALID_ARGUMENT for a supplemental group or a policy as in D-5 of deferral.md; each fault allows one."""
    group, policy = pb.volume_supplemental_group, pb.volume_supplemental_group_change_policy
    wrong = {
        "any-group": group and not (group.isdecimal() and 0 < int(group) <= _GROUP_MAX),
        "any-policy": policy not in ("", "Always", "OnRootMismatch"),
        "policy-alone": policy and not group,
        "two-groups": group and pb.volume_mount_group not in ("", group),
    }
    if any(is_wrong for fault, is_wrong in wrong.items() if fault not in faults):
        raise Failure(Code.INVALID_ARGUMENT, "no such group or policy")


def check_map(values: Mapping[str, str]) -> None:
    """INVALID_ARGUMENT for a map of more than 4 KiB, a kubelet's keys left out."""
    kept = {key: value for key, value in values.items() if not key.startswith(SIDECARS)}
    check_map_size(kept)


def check_map_size(values: Mapping[str, str]) -> None:
    """INVALID_ARGUMENT for a map of more than 4 KiB."""
    if sum(len(key) + len(value) for key, value in values.items()) > 4096:
        raise Failure(Code.INVALID_ARGUMENT, "a map is too long")


def check_topology(requirement: csi_pb2.TopologyRequirement) -> None:
    """RESOURCE_EXHAUSTED unless one of the requisite topologies is the driver's."""
    required = [dict(term.segments) for term in requirement.requisite]
    if required and TOPOLOGY not in required:
        raise Failure(Code.RESOURCE_EXHAUSTED, "not there")
    if required and any(dict(term.segments) not in required for term in requirement.preferred):
        raise Failure(Code.INVALID_ARGUMENT, "what is preferred is not requisite")


def topology() -> csi_pb2.Topology:
    """The driver's topology, on the wire."""
    return csi_pb2.Topology(segments=TOPOLOGY)


def page(
    ids: list[str], max_entries: int, token: str, *, by_position: bool = False
) -> tuple[list[str], str]:
    """One page of ids, which are in creation order; the token is the last of them.

    `by_position` is the classic mistake: a token that is a position.
    """
    if max_entries < 0:
        raise Failure(Code.INVALID_ARGUMENT, "max_entries is negative")
    if token and not token.startswith("after:"):
        raise Failure(Code.ABORTED, "no such token")
    last = token.removeprefix("after:")
    rest = ids[int(last or 0) :] if by_position else [key for key in ids if key > last]
    listed = rest[:max_entries] if max_entries else rest
    if len(listed) == len(rest):
        return listed, ""
    return listed, f"after:{len(ids) - len(rest) + len(listed) if by_position else listed[-1]}"
