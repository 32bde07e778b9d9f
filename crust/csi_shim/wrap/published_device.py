"""What the driver published: is it a block device at all, and which one? Its answer alone is not believed.

A driver that knows no raw block volumes may format and mount whatever it is told to publish, and answer OK. So the
leaf must be a block device: a few drivers make a device node themselves, all others bind one, and only one. How often
the mount namespace lists that bind does not matter. The device is the one of its number, never the one of the mount:
that is devtmpfs.
"""

import os

from crust import errors, volumes
from crust.csi_shim.wrap import private_directories, vendors
from crust.csi_shim.wrap.private_directories import Kind, PublishedLeaf
from crust.host.block import device_nodes, devices


class NotPublishedAsBlock(errors.RuntimeFailed):
    """The driver answered OK to the publish of a raw block volume, and there is no block device."""

    def __init__(self, key: volumes.VolumeKey, found: PublishedLeaf) -> None:
        super().__init__(
            f"volume {key} cannot be deferred",
            why=f"the driver {key.driver} answered OK to its publish as a raw block device, and published "
            f"{found.kind.value}; this was undone",
            hint=vendors.without_device(key.driver)
            or "the driver may not support raw block volumes: use crust.dev/defer: never for its volumes",
        )


class CoveredDevice(errors.PeerUnavailable):
    """Different files are mounted over each other where the driver publishes the device of a deferred volume."""

    def __init__(self, key: volumes.VolumeKey, leaf: str, sources: int) -> None:
        super().__init__(
            f"volume {key} cannot be deferred now",
            why=f"{sources} different files are mounted at {leaf}, and which of them is the volume is not known",
            hint=f"findmnt -o SOURCE,FSROOT -M {leaf} shows them: unmount what the driver did not mount",
        )


def device(
    key: volumes.VolumeKey, leaf: str, partition: int | None
) -> tuple[volumes.BlockSource, int]:
    """The device at the leaf, or that partition of it, and its size. Blocks.

    Raises `NotPublishedAsBlock`, `CoveredDevice`, `device_nodes.DeviceNodeMissing`, `device_nodes.PartitionMissing`.
    """
    found = private_directories.look(leaf)
    if found.sources > 1:
        raise CoveredDevice(key, leaf, found.sources)
    if found.kind is not Kind.DEVICE:
        raise NotPublishedAsBlock(key, found)
    number = found.number
    if partition is not None:
        number = device_nodes.partition_of(number, partition)
    path = device_nodes.node_of(number)
    identity = devices.identify(path)
    if os.makedev(identity.major, identity.minor) != number:
        raise device_nodes.DeviceNodeMissing(f"{os.major(number)}:{os.minor(number)}", path)
    return volumes.BlockSource(path, identity), devices.size_bytes(path)


def size_at(leaf: str) -> tuple[int, bool]:
    """The size of the device at a leaf, 0 if there is none, and whether it is a mapping of dm-crypt. Blocks."""
    found = private_directories.look(leaf)
    if found.kind is not Kind.DEVICE:
        return 0, False
    path = device_nodes.node_of(found.number)
    return devices.size_bytes(path), device_nodes.is_encrypted(found.number)
