"""The keys and values of known drivers, as data: volumes that cannot be deferred, and options that a guest must know.

Each row names the driver that it comes from. A row matches by key for every driver, because forks keep the keys of
their origin; if a key is too common for that, the row names the driver.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

PARTITION = "partition"
"""volume_context: the volume is this partition of the disk. awsebs, gce hand it out, azuredisk, alibaba the disk."""

NETWORK_FILESYSTEMS = frozenset(
    {"9p", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "zfs"}
)
"""Values of fs_type that are no filesystem on a block device; zfs has its own devices."""


@dataclass(frozen=True, slots=True)
class NotDeferrable:
    """A volume whose context has `key`, with one of `values` (none: with any), cannot be deferred.

    `driver`: only this driver's volumes.
    """

    key: str
    values: frozenset[str]
    why: str
    driver: str = ""


NOT_DEFERRABLE = (
    # ceph-csi rbd: fscrypt, set up through the mounted filesystem
    NotDeferrable("encryptionType", frozenset({"file"}), "its files are encrypted by the host"),
    # ceph-csi rbd: the process that serves the device ends with the driver's pod
    NotDeferrable(
        "mounter",
        frozenset({"rbd-nbd"}),
        "its driver connects it again after a restart only where it has mounted it: use the mounter rbd",
    ),
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
    # trident, publish_context: the kind is fixed when the volume is created
    NotDeferrable(
        "filesystemType",
        frozenset({"ext3", "ext4", "xfs"}),
        "its driver created it as a filesystem, and does not publish it as a block device",
        driver="csi.trident.netapp.io",
    ),
    # portworx
    NotDeferrable("sharedv4", frozenset({"true"}), "it is exported by NFS"),
    # linstor: no mount option of the CO's, and an xfs_io command after the mount
    NotDeferrable(
        "linstor.csi.linbit.com/mount-options",
        frozenset(),
        "its driver adds mount options that a guest is not given: write them as mountOptions",
    ),
    NotDeferrable(
        "linstor.csi.linbit.com/post-mount-xfs-opts",
        frozenset(),
        "its driver runs xfs_io on the mounted filesystem",
    ),
    # alibaba, publish_context
    NotDeferrable(
        "runtime",
        frozenset({"sandbox-pvm"}),
        "its driver hands it to the sandbox by itself",
        driver="diskplugin.csi.alibabacloud.com",
    ),
)

_FILE_SHARES = (
    ("csi.vsphere.vmware.com", re.compile(r"file:")),
    ("csi-powerstore.dellemc.com", re.compile(r".*/nfs\Z")),
)
"""Drivers, and their volume ids that are file shares."""

_SECRETS = (
    (
        "csi.hetzner.cloud",
        "encryption-passphrase",
        "its driver encrypts it, and leaves the mapping open when it unpublishes a block device: another volume "
        "could get it",
    ),
)
"""Drivers, keys of the secrets of a publish, and why such a volume cannot be deferred."""

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
"""volume_context: the volume was not created empty, even if other keys say so."""

MKFS_OPTIONS = (
    *("blocksize", "inodesize", "bytesperinode", "numberofinodes"),  # awsebs
    *("ext4bigalloc", "ext4clustersize", "ext4encryptionsupport"),  # awsebs
    "mkfsOptions",  # ceph-csi rbd, alibaba
    "fsFormatOptions",  # hetzner
    "formatOptions",  # trident, publish_context
    "linstor.csi.linbit.com/fsOpts",  # linstor; a parameter that is in no context
)
"""Contexts: the driver's options for mkfs. A guest makes the filesystem, and cannot follow them."""

_FS_TYPE = {"disk.csi.azure.com": "fstype", "linstor.csi.linbit.com": "fstype"}
"""Driver to the key, in lower case, of its contexts that overrides the capability's fs_type."""

_NODE_EXPAND_FAILS = frozenset({"linstor.csi.linbit.com"})
"""Drivers that answer NodeExpandVolume of a raw block volume with an error, and do not need the call."""


WITHOUT_DEVICE = {
    "diskplugin.csi.alibabacloud.com": "it hands the volumes of pods with the RuntimeClass rund or runv to the "
    "sandbox by itself: set crust.dev/defer: never in their StorageClass"
}
"""Drivers that publish no device for some pods, which only they know, with the remedy."""


def why_not_deferrable(
    driver: str, volume_id: str, fs_type: str, *contexts: Mapping[str, str]
) -> str:
    """The reason why the volume cannot be deferred; empty if none is known. A new volume has no id yet."""
    for name, ids in _FILE_SHARES:
        if driver == name and ids.match(volume_id):
            return "it is a file share, by its id"
    if fs_type.lower() in NETWORK_FILESYSTEMS:
        return f"{fs_type} is no filesystem on a block device"
    for context in contexts:
        for row in NOT_DEFERRABLE:
            if row.driver in ("", driver) and _matches(context, row.key, row.values):
                return f"{row.key} is {context[row.key][:64]!r}: {row.why}"
    return ""


def why_not_with_secrets(driver: str, secrets: Mapping[str, str]) -> str:
    """The reason by the secrets of a publish, without a secret in it; empty if none is known."""
    reasons = [reason for name, key, reason in _SECRETS if name == driver and secrets.get(key)]
    return reasons[0] if reasons else ""


def never_formats(context: Mapping[str, str]) -> bool:
    """Whether the context says that the volume was not created empty."""
    return any(_matches(context, key, values) for key, values in NEVER_FORMAT)


def mkfs_option(*contexts: Mapping[str, str]) -> str:
    """The first key for mkfs in the contexts; empty if there is none."""
    return next((key for key in MKFS_OPTIONS for context in contexts if context.get(key)), "")


def fs_type(driver: str, *contexts: Mapping[str, str]) -> str:
    """The filesystem that the driver's own contexts name; empty if none."""
    override = _FS_TYPE.get(driver)
    if override is None:
        return ""
    pairs = (pair for context in contexts for pair in context.items())
    return next((value for key, value in pairs if key.lower() == override), "")


def expands_at_node(driver: str) -> bool:
    """Whether NodeExpandVolume of a raw block volume may be called."""
    return driver not in _NODE_EXPAND_FAILS


def _matches(context: Mapping[str, str], key: str, values: frozenset[str]) -> bool:
    value = context.get(key)
    return bool(value) and (not values or value in values)
