"""The ways in which a case asks to use a volume."""

from crust.wire.csi.v1 import csi_pb2

Mode = csi_pb2.VolumeCapability.AccessMode
NO_FILESYSTEM = "crust-conformance-fs"


def mount(
    fs_type: str = "",
    mode: Mode.Mode.ValueType = Mode.SINGLE_NODE_WRITER,
    group: str = "",
) -> csi_pb2.VolumeCapability:
    """A filesystem, by default for one writer on one node."""
    return csi_pb2.VolumeCapability(
        mount=csi_pb2.VolumeCapability.MountVolume(fs_type=fs_type, volume_mount_group=group),
        access_mode=Mode(mode=mode),
    )


def block(mode: Mode.Mode.ValueType = Mode.SINGLE_NODE_WRITER) -> csi_pb2.VolumeCapability:
    """A raw device."""
    return csi_pb2.VolumeCapability(
        block=csi_pb2.VolumeCapability.BlockVolume(), access_mode=Mode(mode=mode)
    )
