"""What drivers say in their own words, as data: what cannot be deferred, and options that a guest must know.

Each row names the driver that it comes from. A row is matched by key, whatever driver is behind the shim, because
forks keep the keys of their origin; where a key is too common for that, the row names the driver.
"""

from collections.abc import Mapping
from dataclasses import dataclass

PARTITION = "partition"
"""volume_context: the volume is this partition of the disk. awsebs, gce hand it out, azuredisk, alibaba the disk."""

NETWORK_FILESYSTEMS = frozenset(
    {"9p", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "zfs"}
)
"""fs_type of what is no filesystem on a block device, or, as zfs, one that has its own devices."""


@dataclass(frozen=True, slots=True)
class NotDeferrable:
    """A volume whose context has `key`, with one of `values` (none: with any), cannot be deferred."""

    key: str
    values: frozenset[str]
    why: str


NOT_DEFERRABLE = (
    # ceph-csi rbd: fscrypt, set up through the mounted filesystem
    NotDeferrable("encryptionType", frozenset({"file"}), "its files are encrypted by the host"),
    # gce: the stage makes an LVM cache on the disk, and a raw publish hands out the disk below it
    NotDeferrable("data-cache-size", frozenset(), "it has a data cache on the host"),
    NotDeferrable("data-cache-mode", frozenset(), "it has a data cache on the host"),
    NotDeferrable("local-ssd-cache-size", frozenset(), "it has a data cache on the host"),
    # zfs-localpv: a dataset and no zvol
    NotDeferrable("fstype", frozenset({"zfs"}), "it is a ZFS dataset and no block device"),
    # vsphere
    NotDeferrable("type", frozenset({"vSphere CNS File Volume"}), "it is a file share"),
    # trident, publish_context
    NotDeferrable("protocol", frozenset({"file"}), "it is a file share"),
    # portworx
    NotDeferrable("sharedv4", frozenset({"true"}), "it is exported by NFS"),
)

NEVER_FORMAT: tuple[tuple[str, frozenset[str]], ...] = (
    # digitalocean
    ("dobs.csi.digitalocean.com/noformat", frozenset()),
    ("com.digitalocean.csi.dobs/noformat", frozenset()),
    # ceph-csi rbd: an image that somebody else made
    ("staticVolume", frozenset({"true"})),
    # longhorn: content that CreateVolume imported without a content source
    ("fromBackup", frozenset()),
    ("backingImage", frozenset()),
    ("dataSource", frozenset()),
)
"""volume_context: not created empty, whatever else says so."""

MKFS_OPTIONS = (
    *("blocksize", "inodesize", "bytesperinode", "numberofinodes"),  # awsebs
    *("ext4bigalloc", "ext4clustersize", "ext4encryptionsupport"),  # awsebs
    "mkfsOptions",  # ceph-csi rbd, alibaba
    "fsFormatOptions",  # hetzner
    "formatOptions",  # trident, publish_context
)
"""Contexts: how the driver would make the filesystem. A guest makes it, and cannot follow them."""

_FS_TYPE = {"disk.csi.azure.com": "fstype"}
"""Driver to the key, in lower case, of its volume_context that overrides the capability's fs_type."""

_NODE_EXPAND_FAILS = frozenset({"linstor.csi.linbit.com"})
"""Drivers that answer NodeExpandVolume of a raw block volume with an error, and need it for nothing."""


def why_not_deferrable(fs_type: str, *contexts: Mapping[str, str]) -> str:
    """What of the volume rules deferral out, in words; empty if nothing is known."""
    if fs_type.lower() in NETWORK_FILESYSTEMS:
        return f"{fs_type} is no filesystem on a block device"
    for context in contexts:
        for row in NOT_DEFERRABLE:
            if _matches(context, row.key, row.values):
                return f"{row.key} is {context[row.key][:64]!r}: {row.why}"
    return ""


def never_formats(context: Mapping[str, str]) -> bool:
    """Whether the context says that the volume was not created empty."""
    return any(_matches(context, key, values) for key, values in NEVER_FORMAT)


def mkfs_option(*contexts: Mapping[str, str]) -> str:
    """The first key for mkfs in the contexts; empty if there is none."""
    return next((key for key in MKFS_OPTIONS for each in contexts if each.get(key)), "")


def fs_type(driver: str, context: Mapping[str, str]) -> str:
    """The filesystem that the driver's own context names; empty if none."""
    wanted = _FS_TYPE.get(driver)
    if wanted is None:
        return ""
    return next((value for key, value in context.items() if key.lower() == wanted), "")


def expands_at_node(driver: str) -> bool:
    """Whether NodeExpandVolume of a raw block volume may be called."""
    return driver not in _NODE_EXPAND_FAILS


def _matches(context: Mapping[str, str], key: str, values: frozenset[str]) -> bool:
    value = context.get(key)
    return bool(value) and (not values or value in values)
