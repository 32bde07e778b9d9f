"""A wrapped volume's private directories: their names, and the staging directory as a record.

Names are a pure function of driver, volume id and target, so that they are the same after any restart and upgrade.
They lie below the directories of the kubelet for raw block volumes, in exactly its two forms: every driver's pod
sees them, drivers that parse such paths can, and a kubelet never looks there for volumes of its own. No name is
`mount` or `globalmount` or holds `pvc-`: some drivers act on these.

The record of a volume (docs/decisions/0020) is its staging directory, and beside it, while the stage is changed, the
directory of the change. Without a record the volume is staged as the CO asked. With the staging directory alone it is
staged as block. With the change the driver may have it in either way or in none. After a kill a directory may be
left, but is never missing. The sticky bit says that the stage had secrets.

All functions block, except the functions of names.
"""

import contextlib
import functools
import hashlib
import os
import stat
from dataclasses import dataclass

from crust.core import errors, volumes
from crust.host.files import listing
from crust.host.mounts import mountinfo
from crust.host.process import syscalls

MODE = 0o750
_DEPTH_MAX = 16
_BELOW = "plugins/kubernetes.io/csi/volumeDevices"
_DIGITS = 40
PREFIX = "crust-"
"""Begins the names of all volumes, and of no PersistentVolume that a CO made."""


def root(kubelet_root: str) -> str:
    """The kubelet's directory for raw block volumes."""
    return os.path.join(kubelet_root, _BELOW)


def directories(kubelet_root: str) -> tuple[str, str]:
    """The directories of the staged volumes and of the published volumes."""
    above = root(kubelet_root)
    return f"{above}/staging", f"{above}/publish"


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:_DIGITS]


@dataclass(frozen=True, slots=True)
class PrivatePaths:
    """The paths of one volume: `staging`, `change` are directories, below `published` is a leaf for each target."""

    key: volumes.VolumeKey
    staging: str
    change: str
    published: str

    @staticmethod
    @functools.lru_cache(maxsize=1024)  # every call about a volume comes here
    def of(kubelet_root: str, key: volumes.VolumeKey) -> "PrivatePaths":
        name = f"{PREFIX}{_digest(chr(0).join((key.driver, key.volume_id)))}"
        staging, published = directories(kubelet_root)
        return PrivatePaths(
            key, f"{staging}/{name}", f"{staging}/{name}-change", f"{published}/{name}"
        )

    def leaf(self, target: str) -> str:
        """The path at which the driver publishes the device for a target of the CO."""
        return f"{self.published}/{_digest(target)}"


class DriverDidNotCleanUp(errors.RuntimeFailed):
    def __init__(self, call: str, path: str, remains: str) -> None:
        super().__init__(
            f"{call} left {remains} at {path}", why="the driver answered OK, and did not remove it"
        )


def has_volumes(kubelet_root: str) -> bool:
    """Whether any volume of a wrapped driver is staged or published here."""
    names = (name for each in directories(kubelet_root) for name in listing.names(each))
    return any(name.startswith(PREFIX) for name in names)


def is_staged(paths: PrivatePaths) -> bool:
    """Whether there is a record: the volume is staged as block, or not known to be staged as the CO asked."""
    # each change makes and removes them so
    return is_changing(paths) or listing.exists(paths.staging)


def is_changing(paths: PrivatePaths) -> bool:
    """Whether a change of the stage has begun, and has not ended."""
    return listing.exists(paths.change)


def is_block(paths: PrivatePaths) -> bool:
    """Whether the volume is known to be staged as block."""
    return not is_changing(paths) and listing.exists(paths.staging)


def has_leaf(paths: PrivatePaths, target: str) -> bool:
    """Whether a publish for the target has begun."""
    return listing.exists(paths.leaf(target))


def is_private(paths: PrivatePaths, target: str, is_deferred: bool) -> bool:  # noqa: FBT001 - by position
    """Whether the target is published at a leaf, or may be."""
    return has_leaf(paths, target) or (is_wrapped(paths) if is_deferred else is_staged(paths))


def is_wrapped(paths: PrivatePaths) -> bool:
    """Whether the volume is staged as block, or published so."""
    return is_staged(paths) or listing.exists(paths.published)


def had_secrets(paths: PrivatePaths) -> bool:
    """Whether the stage had secrets, by the record."""
    for path in (paths.staging, paths.change):
        with syscalls.translating(f"cannot look at {path}"), contextlib.suppress(FileNotFoundError):
            if os.lstat(path).st_mode & stat.S_ISVTX:
                return True
    return False


def make_staging(paths: PrivatePaths, *, secrets: bool) -> bool:
    """Make the staging directory; returns whether the volume had no record."""
    is_changed = is_changing(paths)
    return _make(paths.staging, secrets=secrets) and not is_changed


def begin_change(paths: PrivatePaths, *, secrets: bool) -> None:
    """Record that the volume may be staged in any way or in none, before the driver unstages it."""
    _make(paths.change, secrets=secrets)


def end_change(paths: PrivatePaths) -> None:
    """The volume is staged as the rest of the record says."""
    with (
        syscalls.translating(f"cannot remove {paths.change}"),
        contextlib.suppress(FileNotFoundError),
    ):
        os.rmdir(paths.change)


def _make(path: str, *, secrets: bool) -> bool:
    mode = MODE | (stat.S_ISVTX if secrets else 0)
    with syscalls.translating(f"cannot make {path}"):
        os.makedirs(os.path.dirname(path), MODE, exist_ok=True)
        try:
            os.mkdir(path, mode)
            is_new = True
        except FileExistsError:
            is_new = False
        os.chmod(path, mode)  # the umask, or an earlier stage of other secrets
    return is_new


def is_mounted(path: str) -> bool:
    """Whether anything is mounted at a directory or below it, as some drivers do at a staging path."""
    if not path:
        return False
    real = os.path.realpath(path)
    return bool(mountinfo.stacked_at(real) or mountinfo.below(real))


def remove_staging(paths: PrivatePaths) -> None:
    """Remove the record, and the files that the driver left in it. Raises `DriverDidNotCleanUp` for mounts."""
    if is_mounted(paths.staging):
        raise DriverDidNotCleanUp("NodeUnstageVolume", paths.staging, "a mount")
    with (
        syscalls.translating(f"cannot remove {paths.staging}"),
        contextlib.suppress(FileNotFoundError),
    ):
        _remove_tree(paths.staging, os.lstat(paths.staging).st_dev, _DEPTH_MAX)
    end_change(paths)


def _remove_tree(path: str, device: int, depth: int) -> None:
    """Remove files and directories, but never those of another filesystem, as the kubelet does."""
    with os.scandir(path) as entries:
        kinds = [(entry, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for entry, is_directory in kinds:
        if not is_directory:
            os.unlink(entry.path)
        elif depth and entry.stat(follow_symlinks=False).st_dev == device:
            _remove_tree(entry.path, device, depth - 1)
    os.rmdir(path)
