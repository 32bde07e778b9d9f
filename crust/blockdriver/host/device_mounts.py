"""The mounts of a device: of the filesystem on it, or a bind of its node.

A raw block volume is published as a bind of the device's node, which mountinfo shows as a mount of devtmpfs. The
kernel reuses numbers and names, so a caller first compares the device's identity.
"""

import os

from crust.core import volumes
from crust.host.mounts import mountinfo

_NODE_FILESYSTEMS = ("devtmpfs", "tmpfs")


def shows(mount: mountinfo.Mount, device: volumes.BlockSource) -> bool:
    """Whether a mount is of the device: its filesystem, or a bind of its node."""
    return is_filesystem(mount, device) or is_node(mount, device)


def is_filesystem(mount: mountinfo.Mount, device: volumes.BlockSource) -> bool:
    return (mount.major, mount.minor) == (device.identity.major, device.identity.minor)


def is_node(mount: mountinfo.Mount, device: volumes.BlockSource) -> bool:
    name = os.path.basename(mount.root)
    return mount.fs_type in _NODE_FILESYSTEMS and name == os.path.basename(device.path)


def is_visible(mount: mountinfo.Mount) -> bool:
    """Whether the mount's own path leads to it, and not to a mount that covers it."""
    topmost = mountinfo.at(mount.target)
    return topmost is not None and topmost.mount_id == mount.mount_id


def filesystem_mounts(device: volumes.BlockSource) -> tuple[mountinfo.Mount, ...]:
    """Every mount in this namespace of the filesystem on the device."""
    return mountinfo.of_devices({(device.identity.major, device.identity.minor)})


def node_mounts(device: volumes.BlockSource) -> tuple[mountinfo.Mount, ...]:
    """Every bind in this namespace of the device's node: it keeps the number, even if another device has it later."""
    return tuple(mount for mount in mountinfo.read_all() if is_node(mount, device))
