"""The checks that this driver supports a capability, that a volume has it, and that no other node has the volume.

One rule serves all RPCs; the caller chooses the error of the specification: INVALID_ARGUMENT for a create or expand,
an empty confirmation for a validate, FAILED_PRECONDITION for a stage or publish.

One node at a time has a volume (ControllerPublishVolume). The controller part writes the list of nodes, and the node
part obeys it: it mounts a volume that was published read-only read-only, and stages no volume of another node.
"""

from dataclasses import dataclass

from crust.blockdriver.records.models import Usage, VolumeRecord
from crust.core import errors, volumes
from crust.host.mounts import mount_options

DEFAULT_FS_TYPE = "ext4"


class CapabilityNotSupported(errors.InvalidRequest):
    def __init__(self, why: str) -> None:
        super().__init__("the volume cannot have this capability", why=why)


class CapabilityExceeded(errors.NotReady):
    def __init__(self, volume_id: str, why: str) -> None:
        super().__init__(f"{volume_id} cannot be used with this capability", why=why)


class AboveLimit(errors.OutOfRange):
    def __init__(self, volume_id: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{volume_id} has {size_bytes} bytes",
            why=f"limit_bytes is {limit_bytes}, and a volume never shrinks",
        )


@dataclass(frozen=True, slots=True)
class SupportedCapabilities:
    """The access modes of filesystems and of raw volumes, and the filesystems, that engine and host support."""

    modes: frozenset[volumes.AccessMode]
    raw_modes: frozenset[volumes.AccessMode]
    fs_types: tuple[str, ...]

    def obstacle(self, capability: volumes.VolumeCapability) -> str:
        """The reason why `capability` is not supported; empty if it is. Never contains the value of a mount flag."""
        is_raw = isinstance(capability.access, volumes.BlockAccess)
        if capability.mode not in (self.raw_modes if is_raw else self.modes):
            why = "is not supported: a volume has writers on one node at most"
            if capability.mode in self.raw_modes:
                why = "is for raw block volumes alone: a filesystem that two nodes mount is destroyed by the second"
            return f"the access mode {capability.mode.name} {why}"
        if isinstance(capability.access, volumes.BlockAccess):
            return ""
        fs_type = capability.access.fs_type
        if fs_type and fs_type not in self.fs_types:
            return f"the filesystem {fs_type[:32]!r} is not one of {', '.join(self.fs_types)}"
        try:
            mount_options.parse(capability.access.mount_flags, for_guest=False)
        except errors.InvalidRequest as err:
            return str(err)
        return ""


def usages_of(
    capabilities: tuple[volumes.VolumeCapability, ...], fs_type: str
) -> tuple[Usage, ...]:
    """The usages of a request, sorted and unique, to compare requests. `fs_type` is the StorageClass's default."""
    usages = {usage_of(capability, fs_type or DEFAULT_FS_TYPE) for capability in capabilities}
    return tuple(sorted(usages, key=lambda usage: (usage.kind, usage.fs_type, usage.mode)))


def usage_of(capability: volumes.VolumeCapability, fs_type: str = "") -> Usage:
    """The usage of one capability; `fs_type` is the default."""
    access, mode = capability.access, capability.mode.value
    if isinstance(access, volumes.BlockAccess):
        return Usage(kind="block", fs_type="", mode=mode)
    return Usage(kind="mount", fs_type=access.fs_type or fs_type, mode=mode)


def wanted_fs_type(access: volumes.MountAccess, record: VolumeRecord, present: str) -> str:
    """The filesystem of a stage or publish: the request's, else the `present`, else the planned filesystem."""
    planned = (usage.fs_type for usage in record.usages if usage.kind == "mount")
    return access.fs_type or present or next(planned, DEFAULT_FS_TYPE)


class PublishedToOtherNode(errors.NotReady):
    def __init__(self, volume_id: str, node_id: str) -> None:
        super().__init__(
            f"{volume_id} is published to the node {node_id}", why="one node at a time can have it"
        )


def check_not_published(record: VolumeRecord) -> None:
    if record.nodes:
        raise PublishedToOtherNode(record.volume_id, record.nodes[0].node_id)
