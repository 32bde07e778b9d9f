"""Target paths, which a CO names: used only below allowed roots, and never through a symbolic link below them.

A `TargetPath` is well formed; the kernel decides at each use to which directory it leads. So `parent_of` opens the
parent from the root with every link refused (openat2(2)), and the target is created or removed in that directory, by
descriptor. Links may lead to the root itself: the operator wrote it.

Removal takes only empty directories and empty files: a recursive delete of a target that is still mounted would
delete the volume's data.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from crust.core import errors
from crust.core.printable import some
from crust.core.volumes import TargetPath
from crust.host.process import syscalls

_DEPTH_MAX = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SymlinkInPath(errors.Refused):
    def __init__(self, target: TargetPath, component: str) -> None:
        super().__init__(
            f"{target} is refused", why=f"its component {component!r} is a symbolic link"
        )


class TargetConflict(errors.Conflict):
    def __init__(self, target: TargetPath, why: str, *, hint: str = "check it by hand") -> None:
        super().__init__(
            f"{target} cannot be used as a target", why=why, hint=f"{hint}; no data was removed"
        )


def _not_empty(target: TargetPath, parent: int, name: str) -> TargetConflict:
    """The conflict with what lies in the directory; a guard mount may cover it again when somebody looks."""
    with syscalls.closing(os.open(name, _DIRECTORY, dir_fd=parent)) as directory:
        shown = some([*map(repr, sorted(os.listdir(directory)))], most=3)
    return TargetConflict(
        target,
        f"the directory is not empty, it has {shown}",
        hint=f"look at it without the mounts in it: mount --bind {os.path.dirname(target.text)} DIRECTORY",
    )


def root_of(target: TargetPath, roots: Sequence[str]) -> str:
    """The root that `target` is below, by its text alone. Raises `PathOutsideRoots`."""
    below = (root for root in roots if target.text.startswith(f"{root.rstrip('/')}/"))
    root = next(below, None)
    if root is None:
        raise errors.Refused.named(
            "PathOutsideRoots",
            f"{target} is not an allowed target",
            why=f"it is below none of {', '.join(roots) or '(no roots)'}",
        )
    return root


@contextmanager
def parent_of(target: TargetPath, roots: Sequence[str]) -> Iterator[int]:
    """An O_PATH descriptor of the parent of `target`. The CO creates the parent (CSI NodePublishVolume).

    Raises `PathOutsideRoots`, `SymlinkInPath`, `NotFound`.
    """
    root = root_of(target, roots)
    above, _, _ = target.text[len(root.rstrip("/")) + 1 :].rpartition("/")
    with syscalls.opened(root, f"cannot reach {target}", os.O_PATH | os.O_DIRECTORY) as directory:
        try:
            parent = syscalls.open_beneath(directory, above or ".")
        except OSError:
            _check_components(target, root, above)
            raise
    with syscalls.closing(parent):
        yield parent


def _check_components(target: TargetPath, root: str, above: str) -> None:
    """Raise the error that names the component in the way, if it is still there."""
    path = root
    for name in above.split("/"):
        path = f"{path}/{name}"
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISLNK(mode):
            raise SymlinkInPath(target, name)
        if not stat.S_ISDIR(mode):
            raise TargetConflict(target, f"its component {name!r} is not a directory")


def make_directory(target: TargetPath, roots: Sequence[str]) -> bool:
    """As `made_directory`; True if the directory was created."""
    with made_directory(target, roots) as (_, created):
        return created


@contextmanager
def made_directory(target: TargetPath, roots: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Create the target directory; gives a path of it, and whether it is new, and so cannot be a mount point.

    The path leads through the descriptor of its parent: no link above it can be changed meanwhile. An existing
    directory is kept if it is empty or a mount point; else raises `TargetConflict`.
    """
    with parent_of(target, roots) as parent:
        created, name = True, os.path.basename(target.text)
        with syscalls.translating(f"cannot create {target}"):
            try:
                os.mkdir(name, 0o750, dir_fd=parent)
            except FileExistsError:
                created = False
                if not stat.S_ISDIR(_look(target, parent, name).st_mode):
                    raise TargetConflict(target, "it is not a directory") from None
                if not _is_mountpoint(parent, name):
                    with syscalls.closing(os.open(name, _DIRECTORY, dir_fd=parent)) as child:
                        is_empty = not os.listdir(child)
                    if not is_empty:
                        raise _not_empty(target, parent, name) from None
        yield f"/proc/self/fd/{parent}/{name}", created


def make_file(target: TargetPath, roots: Sequence[str]) -> None:
    """Create the empty file on which a block device is bound. An empty file, or a device bound there, is kept."""
    name = os.path.basename(target.text)
    with parent_of(target, roots) as parent, syscalls.translating(f"cannot create {target}"):
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(name, flags, 0o600, dir_fd=parent))
        except FileExistsError:
            status = _look(target, parent, name)
            empty = stat.S_ISREG(status.st_mode) and not status.st_size
            bound = stat.S_ISBLK(status.st_mode) and _is_mountpoint(parent, name)
            if not empty and not bound:
                raise TargetConflict(
                    target, "it is neither an empty file nor a device bound there"
                ) from None


def remove(target: TargetPath, roots: Sequence[str]) -> None:
    """Remove the empty directory or file of a target; an absent one, or an absent parent, is a success.

    Raises `TargetStillMounted`, `TargetConflict` (not empty, a link, a device); never descends.
    """
    try:
        with parent_of(target, roots) as parent, syscalls.translating(f"cannot remove {target}"):
            name = os.path.basename(target.text)
            status = _look(target, parent, name)
            is_empty_file = stat.S_ISREG(status.st_mode) and not status.st_size
            # The kernel refuses everything else that must not be removed; the reason is looked up afterwards.
            try:
                (os.unlink if is_empty_file else os.rmdir)(name, dir_fd=parent)
            except OSError as err:
                if _is_mountpoint(parent, name):
                    raise errors.NotReady.named(
                        "TargetStillMounted", f"{target} is still mounted"
                    ) from err
                if err.errno == errno.ENOTEMPTY:
                    raise _not_empty(target, parent, name) from err
                if err.errno == errno.ENOTDIR:
                    why = "it is neither an empty directory nor an empty file"
                    raise TargetConflict(target, why) from err
                raise
    except errors.NotFound:
        return


def remove_empty_below(target: TargetPath, roots: Sequence[str]) -> None:
    """Remove directories that hold nothing but such directories, below a target that is not mounted.

    A kubelet creates them for a `subPath`, in the directory itself where the guard mount was lost. rmdir(2) alone is
    used, so data cannot be lost; everything else stays, and `remove` then names it. It enters no mount.
    """
    try:
        with parent_of(target, roots) as parent, syscalls.translating(f"cannot clear {target}"):
            name = os.path.basename(target.text)
            if not _is_mountpoint(parent, name):
                _remove_children(parent, name, _DEPTH_MAX)
    except errors.NotFound:
        return


def _remove_children(parent: int, name: str, depth: int) -> None:
    try:
        directory = os.open(name, _DIRECTORY, dir_fd=parent)
    except OSError as err:
        if err.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        return  # a file or a link, which `remove` names
    with syscalls.closing(directory):
        for child in os.listdir(directory) if depth else ():
            try:
                if not _is_mountpoint(directory, child):
                    _remove_children(directory, child, depth - 1)
                    os.rmdir(child, dir_fd=directory)
            except OSError as err:
                if err.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise


def _look(target: TargetPath, parent: int, name: str) -> os.stat_result:
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise SymlinkInPath(target, name)
    return status


def _is_mountpoint(parent: int, name: str) -> bool:
    # Not by a device number that differs from the parent's: that misses binds within one filesystem.
    return syscalls.mount_at(f"/proc/self/fd/{parent}/{name}").is_root
