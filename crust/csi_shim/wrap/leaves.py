"""Leaves, at which the driver publishes devices: the observation, the decisions of a publish, and the device.

A publish observes the leaf; `use_of`, `undo_plan` and `residue_of` decide by that and by the driver's outcome alone.
Only a publish that began with an empty leaf undoes anything, because an older mount may belong to a running guest.
The driver's answer alone proves nothing: a driver without raw block volumes may format and mount the volume, and
answer OK. A few drivers make a device node themselves, all others bind one; the number of entries for that bind in
the mount namespace does not matter. The device is known by its number, and not by its mount, which is devtmpfs.

All functions block, except the decisions.
"""

import enum
import os
import stat
from dataclasses import dataclass

from crust.core import errors, volumes
from crust.csi_shim.wrap import private_directories, vendors
from crust.csi_shim.wrap.private_directories import DriverDidNotCleanUp, PrivatePaths
from crust.host.block import devices
from crust.host.files import listing
from crust.host.mounts import mountinfo
from crust.host.process import syscalls
from crust.rpc.status import DriverOutcome, Residue, Undo


class Kind(enum.Enum):
    ABSENT = "nothing"
    DEVICE = "a block device"
    FILE = "a file"
    DIRECTORY = "a directory"
    OTHER = "something else"


@dataclass(frozen=True, slots=True)
class LeafState:
    """One observation of a leaf: its kind, the device's number, the number of mounts, and of different mounted files.

    A mount namespace that has two mounts of the kubelet's root, as systemd's ReadWritePaths= makes them, lists each
    mount of the driver twice: two mounts of one file. `is_begun`: a publish at this leaf was begun, because the leaf
    exists, or its directory without any leaf.
    """

    kind: Kind
    number: int
    mounts: int
    sources: int
    is_begun: bool


class LeafUse(enum.Enum):
    """The use of a leaf when a publish begins."""

    NEW = "nothing: this call makes everything"
    BEGUN = "a leaf or its directory, and no mount: an earlier call was interrupted, or a mount was lost"
    DEVICE = "a mounted device, which a guest may have"
    OTHER = "a mount that is no device, which no guest has"


def use_of(seen: LeafState) -> LeafUse:
    """Mounts of different files are DEVICE: one of them may be the device."""
    if seen.mounts and (seen.kind is Kind.DEVICE or seen.sources > 1):
        return LeafUse.DEVICE
    if seen.mounts:
        return LeafUse.OTHER
    return LeafUse.BEGUN if seen.is_begun else LeafUse.NEW


def undo_plan(before: LeafUse, outcome: DriverOutcome, *, is_mounted: bool) -> Undo:
    """The undo, by the state `before` the publish and the driver's call; `is_mounted`: the leaf has a mount now."""
    if before is not LeafUse.NEW or outcome is DriverOutcome.SILENT:
        return Undo.NOTHING
    if outcome is DriverOutcome.ANSWERED or is_mounted:
        return Undo.UNPUBLISH
    return Undo.REMOVE


def residue_of(before: LeafUse, outcome: DriverOutcome, after: LeafState) -> Residue:
    """The residue of the publish after its undo: with one, the code must not be final (D-36)."""
    is_undone = before is LeafUse.NEW and outcome is not DriverOutcome.SILENT
    return Residue.NONE if is_undone and use_of(after) is LeafUse.NEW else Residue.EXISTS


def look(path: str) -> LeafState:
    directory, name = os.path.split(path)
    real = os.path.join(os.path.realpath(directory), name)
    stack = mountinfo.stacked_at(real)
    mounts = len(stack), len({(mount.major, mount.minor, mount.root) for mount in stack})
    with syscalls.translating(f"cannot look at {path}"):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return LeafState(Kind.ABSENT, 0, *mounts, is_begun=_is_empty(directory))
    kinds = {stat.S_IFBLK: Kind.DEVICE, stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.DIRECTORY}
    kind = kinds.get(stat.S_IFMT(status.st_mode), Kind.OTHER)
    return LeafState(kind, status.st_rdev, *mounts, is_begun=True)


def _is_empty(directory: str) -> bool:
    """Whether the directory exists, and has no leaf of any target."""
    try:
        return not os.listdir(directory)
    except FileNotFoundError:
        return False


def of(paths: PrivatePaths) -> tuple[str, ...]:
    return tuple(f"{paths.published}/{name}" for name in listing.names(paths.published))


def is_in_use(paths: PrivatePaths) -> bool:
    """Whether the driver has the device published at any leaf."""
    return any(look(leaf).mounts for leaf in of(paths))


def remove(path: str) -> None:
    """As `release`; raises `DriverDidNotCleanUp` for a mount too."""
    if release(path):
        raise DriverDidNotCleanUp("NodeUnpublishVolume", path, "a mount")


def release(path: str) -> int:
    """Remove a leaf without mounts, and its directory if it is empty; returns the number of mounts that prevent it.

    Raises `DriverDidNotCleanUp` for a file with content and a directory with files, which crust never deletes.
    """
    seen = look(path)
    if seen.mounts:
        return seen.mounts
    with syscalls.translating(f"cannot remove {path}"):
        if seen.kind is Kind.DIRECTORY:
            try:
                os.rmdir(path)
            except OSError as err:
                raise DriverDidNotCleanUp(
                    "NodeUnpublishVolume", path, "a directory with files"
                ) from err
        elif seen.kind is not Kind.ABSENT:
            if seen.kind is Kind.FILE and os.lstat(path).st_size:
                raise DriverDidNotCleanUp("NodeUnpublishVolume", path, "a file with content")
            os.unlink(path)
        directory = os.path.dirname(path)
        if _is_empty(directory):
            os.rmdir(directory)
    return 0


def prepare(paths: PrivatePaths, path: str) -> None:
    """Remove the leaf and make its directory, before a driver's publish; raises `DriverDidNotCleanUp`.

    A device node of an earlier boot has another device's number now.
    """
    remove(path)
    with syscalls.translating(f"cannot make {paths.published}"):
        os.makedirs(paths.published, private_directories.MODE, exist_ok=True)


def device(
    key: volumes.VolumeKey, leaf: str, partition: int | None
) -> tuple[volumes.BlockSource, int]:
    """The device at the leaf, or that partition of it, and its size.

    Raises `NotPublishedAsBlock`, `CoveredDevice`, `devices.DeviceNodeMissing`, `PartitionMissing`.
    """
    seen = look(leaf)
    if seen.sources > 1:
        raise errors.PeerUnavailable.named(
            "CoveredDevice",
            f"volume {key} cannot be deferred now",
            why=f"{seen.sources} different files are mounted at {leaf}, and which of them is the volume is not known",
            hint=f"findmnt -o SOURCE,FSROOT -M {leaf} shows them: unmount what the driver did not mount",
        )
    if seen.kind is not Kind.DEVICE:
        raise errors.RuntimeFailed.named(
            "NotPublishedAsBlock",
            f"volume {key} cannot be deferred",
            why=f"the driver {key.driver} answered OK to its publish as a raw block device, and published "
            f"{seen.kind.value}; this was undone",
            hint=vendors.WITHOUT_DEVICE.get(key.driver)
            or "the driver may not support raw block volumes: use crust.dev/defer: never for its volumes",
        )
    number = seen.number
    if partition is not None:
        number = devices.partition_of(number, partition)
    path = devices.node_of(number)
    identity = devices.identify(path)
    if os.makedev(identity.major, identity.minor) != number:
        raise devices.DeviceNodeMissing(f"{os.major(number)}:{os.minor(number)}", path)
    return volumes.BlockSource(path, identity), devices.size_bytes(path)


def size_at(leaf: str) -> tuple[int, bool]:
    """The size of the device at a leaf, 0 if there is none, and whether it is a mapping of dm-crypt."""
    seen = look(leaf)
    if seen.kind is not Kind.DEVICE:
        return 0, False
    path = devices.node_of(seen.number)
    return devices.size_bytes(path), devices.is_encrypted(seen.number)
