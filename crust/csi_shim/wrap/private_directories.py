"""The private directories on the disk: that a volume's staging directory exists says that it is staged as block.

There is no other record of that. The directory is made before the driver is called and removed after the driver has
let go, so a kill at any moment leaves a directory too many, never one too few, and the CO's next call goes on from
there. Its sticky bit says that the stage had secrets: they are in no file, so without them in memory nobody could
stage again.
All functions block, `are_known_absent` excepted.
"""

import contextlib
import enum
import os
import stat
from dataclasses import dataclass

from crust import errors
from crust.csi_shim.wrap import private_paths
from crust.csi_shim.wrap.private_paths import PrivatePaths
from crust.host.mounts import mountinfo
from crust.host.process import oserrors, syscalls

_MODE = 0o750
_DEPTH_MAX = 16


class DriverDidNotCleanUp(errors.RuntimeFailed):
    """The driver answered OK, and left a mount or files where it must have removed them."""

    def __init__(self, call: str, path: str, left: str) -> None:
        super().__init__(
            f"{call} left {left} at {path}",
            why="the driver answered OK, and did not remove it",
            hint="read the driver's log; the call is repeated until nothing is left",
        )


class Kind(enum.Enum):
    """What is at a leaf."""

    ABSENT = "nothing"
    DEVICE = "a block device"
    FILE = "a file"
    DIRECTORY = "a directory"
    OTHER = "something else"


@dataclass(frozen=True, slots=True)
class PublishedLeaf:
    """What is at a leaf: its kind as a user sees it, the device's number, and how many mounts there are.

    `sources` is the number of different files that are mounted there. A mount namespace that has two mounts of the
    kubelet's root, as systemd's ReadWritePaths= makes them, lists each mount of the driver twice: one source.
    """

    kind: Kind
    number: int
    mounts: int
    sources: int

    @property
    def is_published(self) -> bool:
        """Whether it is what a publish of a block volume makes: binds of one device."""
        return self.kind is Kind.DEVICE and self.sources == 1


def has_volumes(kubelet_root: str) -> bool:
    """Whether any volume of a wrapped driver is staged or published here."""
    for directory in private_paths.directories(kubelet_root):
        with (
            oserrors.translating(f"cannot list {directory}"),
            contextlib.suppress(FileNotFoundError),
        ):
            if any(name.startswith(private_paths.PREFIX) for name in os.listdir(directory)):
                return True
    return False


def are_known_absent(paths: PrivatePaths) -> bool:
    """Whether it is known without I/O that the volume has no directory here: it is neither staged nor published as
    block, at no target.
    """
    return syscalls.is_known_absent(paths.staging) and syscalls.is_known_absent(paths.published)


def is_staged(paths: PrivatePaths) -> bool:
    """Whether the volume is staged as block."""
    return _exists(paths.staging)


def has_publishes(paths: PrivatePaths) -> bool:
    """Whether the directory of the publishes is there."""
    return _exists(paths.published)


def has_leaf(paths: PrivatePaths, target: str) -> bool:
    """Whether anything is published, or was begun to be, for the target."""
    return _exists(paths.leaf(target))


def had_secrets(paths: PrivatePaths) -> bool:
    """Whether the stage as block had secrets."""
    with oserrors.translating(f"cannot look at {paths.staging}"):
        return bool(os.lstat(paths.staging).st_mode & stat.S_ISVTX)


def make_staging(paths: PrivatePaths, *, secrets: bool) -> bool:
    """Make the record; whether it is new."""
    mode = _MODE | (stat.S_ISVTX if secrets else 0)
    with oserrors.translating(f"cannot make {paths.staging}"):
        os.makedirs(os.path.dirname(paths.staging), _MODE, exist_ok=True)
        try:
            os.mkdir(paths.staging, mode)
            is_new = True
        except FileExistsError:
            is_new = False
        os.chmod(paths.staging, mode)  # the umask, or an earlier stage of other secrets
    return is_new


def make_published(paths: PrivatePaths) -> None:
    """Make the directory that the leaves are in; the driver makes the leaf."""
    with oserrors.translating(f"cannot make {paths.published}"):
        os.makedirs(paths.published, _MODE, exist_ok=True)


def look(path: str) -> PublishedLeaf:
    """What is at a leaf."""
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    stacked = mountinfo.stacked_at(real)
    mounts = len(stacked), len({(each.major, each.minor, each.root) for each in stacked})
    with oserrors.translating(f"cannot look at {path}"):
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return PublishedLeaf(Kind.ABSENT, 0, *mounts)
    kinds = {stat.S_IFBLK: Kind.DEVICE, stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.DIRECTORY}
    return PublishedLeaf(kinds.get(stat.S_IFMT(found.st_mode), Kind.OTHER), found.st_rdev, *mounts)


def leaves(paths: PrivatePaths) -> tuple[str, ...]:
    """The paths of the volume's leaves."""
    with oserrors.translating(f"cannot list {paths.published}"):
        try:
            return tuple(
                f"{paths.published}/{name}" for name in sorted(os.listdir(paths.published))
            )
        except FileNotFoundError:
            return ()


def is_in_use(paths: PrivatePaths) -> bool:
    """Whether the driver has the device published at any leaf."""
    return any(look(leaf).mounts for leaf in leaves(paths))


def remove_leaf(path: str) -> None:
    """Remove what a driver leaves of an unmounted leaf, and the directory above if it is empty.

    Raises `DriverDidNotCleanUp`: a file with content and a directory with files are nobody's to delete.
    """
    found = look(path)
    if found.mounts:
        raise DriverDidNotCleanUp("NodeUnpublishVolume", path, "a mount")
    with oserrors.translating(f"cannot remove {path}"):
        if found.kind is Kind.DIRECTORY:
            try:
                os.rmdir(path)
            except OSError as err:
                raise DriverDidNotCleanUp(
                    "NodeUnpublishVolume", path, "a directory with files"
                ) from err
        elif found.kind is not Kind.ABSENT:
            if found.kind is Kind.FILE and os.lstat(path).st_size:
                raise DriverDidNotCleanUp("NodeUnpublishVolume", path, "a file with content")
            os.unlink(path)
    with contextlib.suppress(OSError):  # another target's leaf is there, or it is gone
        os.rmdir(os.path.dirname(path))


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
    with oserrors.translating(f"cannot remove {paths.staging}"):
        try:
            _remove_tree(paths.staging, os.lstat(paths.staging).st_dev, _DEPTH_MAX)
        except FileNotFoundError:
            return


def _remove_tree(path: str, device: int, depth: int) -> None:
    """As the kubelet removes its own staging directories; never into another filesystem."""
    with os.scandir(path) as found:
        entries = list(found)
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
        elif depth and entry.stat(follow_symlinks=False).st_dev == device:
            _remove_tree(entry.path, device, depth - 1)
    os.rmdir(path)


def _exists(path: str) -> bool:
    with oserrors.translating(f"cannot look at {path}"):
        try:
            os.lstat(path)
        except FileNotFoundError:
            return False
    return True
