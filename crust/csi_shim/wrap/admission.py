"""Checks by the original request whether a volume may be deferred: a driver refuses less as block than as mount.

The driver and the application decide whether several nodes write to one block device; several guests that mount one
filesystem on it destroy it. So the check takes the access mode that the CO sent, before any rewrite.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crust.core import deferral_keys, errors, volumes
from crust.csi_shim.wrap import vendors
from crust.host.filesystems import mkfs
from crust.host.mounts import mount_options
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2

DEFAULT_FS_TYPE = "ext4"
"""The filesystem that drivers make if a capability names none."""

_MODES = frozenset(
    {
        volumes.AccessMode.SINGLE_NODE_WRITER,
        volumes.AccessMode.SINGLE_NODE_READER_ONLY,
        volumes.AccessMode.SINGLE_NODE_SINGLE_WRITER,
        volumes.AccessMode.SINGLE_NODE_MULTI_WRITER,
        volumes.AccessMode.MULTI_NODE_READER_ONLY,
    }
)


class CannotBeDeferred(errors.InvalidRequest):
    def __init__(self, volume_id: str, why: str) -> None:
        super().__init__(f"volume {volume_id[:128]!r} cannot be deferred", why=why)


@dataclass(frozen=True, slots=True)
class Admitted:
    fs_type: str
    options: tuple[str, ...]
    readonly: bool
    group: volumes.GroupChange | None
    partition: int | None
    format: volumes.GuestFormat | None
    encryption: volumes.Encryption | None


def check_stage(driver: str, request: csi_pb2.NodeStageVolumeRequest) -> None:
    """Raise `CannotBeDeferred`, or `errors.InvalidRequest`, if the volume must not be staged as block."""
    capability = csi.capability(request.volume_capability)
    check_mode(request.volume_id, capability)
    _check_kind(driver, request.volume_id, capability, request)


def admit(driver: str, request: csi_pb2.NodePublishVolumeRequest) -> Admitted:
    """Check a publish. Raises `CannotBeDeferred`, `InvalidMountOption`, `InvalidRequest`."""
    csi.volume_id_of_any_driver(request.volume_id)
    if deferral_keys.is_inline(request.volume_context, request.volume_id):
        # the driver makes it in the publish, as a directory, and no unpublish follows a refused publish
        raise CannotBeDeferred(
            request.volume_id, "it is an inline volume, which its driver makes as a filesystem"
        )
    capability = csi.capability(request.volume_capability)
    access = check_mode(request.volume_id, capability)
    fs_type = _check_kind(driver, request.volume_id, capability, request)
    why = vendors.why_not_with_secrets(driver, request.secrets)
    if why:
        raise CannotBeDeferred(request.volume_id, why)
    # checks the key alone: a guest always formats
    deferral_keys.format_in(request.volume_context)
    options = mount_options.parse(access.mount_flags, for_guest=True)
    if fs_type in mkfs.SUPPORTED:
        mount_options.for_kernel(fs_type, options)
    extra = ("nouuid",) if fs_type == "xfs" and "nouuid" not in options else ()
    return Admitted(
        fs_type=fs_type,
        options=(*options, *extra),
        readonly=csi.is_readonly(request),
        group=access.group,
        partition=_partition(request.volume_context),
        format=_format(request, access),
        encryption=deferral_keys.encryption(request.volume_context),
    )


def check_mode(volume_id: str, capability: volumes.VolumeCapability) -> volumes.MountAccess:
    if not isinstance(capability.access, volumes.MountAccess):
        raise CannotBeDeferred(volume_id, "it is a raw block volume, which has no filesystem")
    if capability.mode not in _MODES:
        raise CannotBeDeferred(
            volume_id,
            f"its access mode {capability.mode.name} lets several nodes write, and a filesystem on a block device "
            "has one writer",
        )
    return capability.access


def _check_kind(
    driver: str,
    volume_id: str,
    capability: volumes.VolumeCapability,
    request: csi_pb2.NodeStageVolumeRequest | csi_pb2.NodePublishVolumeRequest,
) -> str:
    assert isinstance(capability.access, volumes.MountAccess)
    vendor_fs_type = vendors.fs_type(driver, request.volume_context, request.publish_context)
    fs_type = vendor_fs_type or capability.access.fs_type or DEFAULT_FS_TYPE
    contexts = (request.volume_context, request.publish_context)
    why = vendors.why_not_deferrable(driver, volume_id, fs_type, *contexts)
    if why:
        raise CannotBeDeferred(volume_id, why)
    return fs_type


def _partition(context: Mapping[str, str]) -> int | None:
    text = context.get(vendors.PARTITION, "")
    if text in ("", "0"):
        return None
    if not volumes.is_number(text):
        raise deferral_keys.InvalidDeferKey(vendors.PARTITION, text, "a decimal number")
    return int(text)


def _format(
    request: csi_pb2.NodePublishVolumeRequest, access: volumes.MountAccess
) -> volumes.GuestFormat | None:
    guest_format = deferral_keys.guest_format(request.volume_context)
    is_direct = "directmount" in access.mount_flags  # azuredisk: mounts without formatting
    if guest_format is None or is_direct or vendors.never_formats(request.volume_context):
        return None
    key = vendors.mkfs_option(request.volume_context, request.publish_context)
    if key:
        raise CannotBeDeferred(
            request.volume_id,
            f"it was created empty, and the guest that makes its filesystem cannot follow {key}",
        )
    return guest_format
