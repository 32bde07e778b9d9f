"""Whether a capability is one that this driver can honour, and for which volume.

One rule answers for all RPCs; the caller knows which error the specification wants: INVALID_ARGUMENT when a
volume is created or grown, an empty confirmation when one is validated, FAILED_PRECONDITION when it is staged or
published.
"""

from dataclasses import dataclass

from crust import errors, mount_options, volumes
from crust.blockdriver.records.volume_record import Usage, VolumeRecord

DEFAULT_FS_TYPE = "ext4"


class CapabilityNotSupported(errors.InvalidRequest):
    """No volume can have this capability here: none is made, published to a node or grown for it."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "the volume cannot have this capability", why=why, hint="ask for another one"
        )


class CapabilityExceeded(errors.NotReady):
    """The volume exists, and cannot be used in this way."""

    def __init__(self, volume_id: str, why: str) -> None:
        super().__init__(
            f"{volume_id} cannot be used with this capability",
            why=why,
            hint="use a capability that ValidateVolumeCapabilities confirms",
        )
        self.volume_id = volume_id


@dataclass(frozen=True, slots=True)
class SupportedCapabilities:
    """What the engine and the host can honour: access modes, and the filesystems that they can make."""

    modes: frozenset[volumes.AccessMode]
    fs_types: tuple[str, ...]

    def obstacle(self, capability: volumes.VolumeCapability) -> str:
        """Why `capability` cannot be honoured; empty if it can. Never shows a mount flag's value."""
        if capability.mode not in self.modes:
            return (
                f"the access mode {capability.mode.name} is not supported: volumes live on one node"
            )
        if isinstance(capability.access, volumes.BlockAccess):
            return ""
        fs_type = capability.access.fs_type
        if fs_type and fs_type not in self.fs_types:
            return f"the filesystem {fs_type[:32]!r} is not one of {', '.join(self.fs_types)}"
        try:
            mount_options.for_host(capability.access.mount_flags)
        except errors.InvalidRequest as err:
            return str(err)
        return ""


def usage_of(capability: volumes.VolumeCapability, fs_type: str) -> Usage:
    """What the record keeps of a capability; `fs_type` is the StorageClass's, for one that names none."""
    if isinstance(capability.access, volumes.BlockAccess):
        return Usage(kind="block", fs_type="", mode=capability.mode.value)
    wanted = capability.access.fs_type or fs_type or DEFAULT_FS_TYPE
    return Usage(kind="mount", fs_type=wanted, mode=capability.mode.value)


def usages_of(
    capabilities: tuple[volumes.VolumeCapability, ...], fs_type: str
) -> tuple[Usage, ...]:
    """The usages of a request in one order, each once, so that two requests can be compared."""
    usages = {usage_of(capability, fs_type) for capability in capabilities}
    return tuple(sorted(usages, key=lambda usage: (usage.kind, usage.fs_type, usage.mode)))


def wanted_fs_type(access: volumes.MountAccess, record: VolumeRecord, present: str) -> str:
    """The filesystem that a stage or publish is about: its own word, what is `present`, what was planned."""
    planned = (usage.fs_type for usage in record.usages if usage.kind == "mount")
    return access.fs_type or present or next(planned, DEFAULT_FS_TYPE)
