"""Volume capabilities as a CO encodes them: crust only decodes."""

from crust.core import volumes
from crust.wire.csi.v1 import csi_pb2


def encoded(value: volumes.VolumeCapability, *, deferred: bool = False) -> csi_pb2.VolumeCapability:
    """Encode a capability; with `deferred` the group goes into the fields for deferral."""
    pb = csi_pb2.VolumeCapability()
    pb.access_mode.mode = csi_pb2.VolumeCapability.AccessMode.Mode.ValueType(value.mode.value)
    if isinstance(value.access, volumes.BlockAccess):
        pb.block.SetInParent()
        return pb
    pb.mount.fs_type = value.access.fs_type
    pb.mount.mount_flags.extend(value.access.mount_flags)
    group = value.access.group
    if group is not None and deferred:
        pb.mount.volume_supplemental_group = str(group.gid)
        pb.mount.volume_supplemental_group_change_policy = group.policy.value
    elif group is not None:
        pb.mount.volume_mount_group = str(group.gid)
    return pb
