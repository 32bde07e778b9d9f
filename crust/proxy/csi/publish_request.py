"""What a deferred NodePublishVolume asks for, and what the driver's answer means for it."""

from dataclasses import dataclass, replace
from typing import Self

from crust import deferral_keys, errors, mount_options, volumes
from crust.handoff.record import Record
from crust.proxy.csi.policy import CannotDeferRawBlock
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2


class DriverIgnoredDeferral(errors.RuntimeFailed):
    """The driver answered a deferred publish without deferred_mount."""

    def __init__(self, key: volumes.VolumeKey) -> None:
        super().__init__(
            f"volume {key} was not deferred",
            why="the driver answered without deferred_mount",
            hint="put a crust shim between the proxy and the driver",
        )


class DriverIgnoredEncryption(errors.RuntimeFailed):
    """The volume context says that the volume is encrypted, and the driver's answer does not."""

    def __init__(self, key: volumes.VolumeKey, asked: volumes.Encryption) -> None:
        super().__init__(
            f"volume {key} was not deferred",
            why=f"{deferral_keys.ENCRYPTION} is {asked.value}, and the driver answered without encryption: the guest "
            "would write it unencrypted",
            hint="update the driver, or the crust shim in front of it",
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, decoded and checked."""

    key: volumes.VolumeKey
    target: volumes.TargetPath
    access: volumes.MountAccess
    options: tuple[str, ...]
    readonly: bool
    is_inline: bool = False
    """A volume of the pod itself, which its unpublish deletes."""

    @classmethod
    def of(cls, key: volumes.VolumeKey, request: csi_pb2.NodePublishVolumeRequest) -> Self:
        """Decode; raises `errors.InvalidRequest`."""
        target = volumes.TargetPath.parse(request.target_path)
        capability = csi.capability(request.volume_capability)
        if not isinstance(capability.access, volumes.MountAccess):
            raise CannotDeferRawBlock()
        options = mount_options.for_guest(capability.access.mount_flags)
        readonly = request.readonly or capability.mode.reader_only or options.readonly
        is_inline = deferral_keys.is_inline(request.volume_context)
        return cls(key, target, capability.access, options.options, readonly, is_inline)

    def is_request_of(self, record: Record) -> bool:
        """Whether the record is of a publish with these arguments, as far as a record tells."""
        asked = mount_options.for_guest(self.access.mount_flags)
        return (
            self.access.fs_type in ("", record.mount.fs_type)
            and self.access.group == record.mount.group
            and (self.readonly or asked.readonly) == record.readonly
            and set(asked.options) <= set(record.mount.mount_options)
        )


def set_flag(request: csi_pb2.NodePublishVolumeRequest) -> None:
    """Prepare the request for the shim: set the flag, and copy the group into the field for deferral (KEP-2857)."""
    request.defer_fs_ops = True
    mount = request.volume_capability.mount
    if mount.volume_mount_group and not mount.volume_supplemental_group:
        mount.volume_supplemental_group = mount.volume_mount_group


def mount_of(
    wanted: Wanted,
    request: csi_pb2.NodePublishVolumeRequest,
    response: csi_pb2.NodePublishVolumeResponse,
) -> volumes.DeferredMount:
    """What the driver answered, with what the CO asked for.

    Raises `DriverIgnoredDeferral`, `DriverIgnoredEncryption`.
    """
    if not response.HasField("deferred_mount"):
        raise DriverIgnoredDeferral(wanted.key)
    answer = csi.deferred_mount(response.deferred_mount)
    asked = deferral_keys.encryption(request.volume_context)
    if asked is not None and answer.encryption is not asked:
        raise DriverIgnoredEncryption(wanted.key, asked)
    return replace(
        answer,
        readonly=answer.readonly or wanted.readonly,
        # asked for, and perhaps not repeated by the driver: they must reach the runtime (KEP-2857)
        mount_options=(*answer.mount_options, *wanted.options),
    )
