"""A directory that is held by a descriptor, and paths below it that lead through this descriptor.

A path is looked up again by each system call: when a disk is unmounted, or another one is mounted over a directory,
the next call writes to another filesystem. A descriptor stays with the directory that was opened. A `HeldPath` is
used as a path in any system call, by way of /proc/self/fd, and is shown as the path that people know. It is of use in
this process only.

From the descriptor on a path is looked up as any other one, so a mount over a folder would be entered. A folder that
holds what matters is held by a descriptor of its own (`hold_folder`).
"""

import os
import pathlib
import weakref
from dataclasses import dataclass
from typing import TypeAlias

from crust.core import errors
from crust.host.process import oserrors, syscalls


class DirectoryReplaced(errors.PeerUnavailable):
    """The directory at a path is not the one that is held."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is not the directory that was opened",
            why="its disk was unmounted, another one was mounted over it, or it was renamed",
            hint="undo that",
        )
        self.path = path


class HeldDirectory:
    """The directory at `path`, once it is held. It owns the descriptor."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self._is_held = False
        self._folders: dict[str, HeldDirectory] = {}

    def hold(self) -> None:
        """Hold what is at the path now, in place of what was held. Raises `NotFound`, and `Conflict` for a file."""
        self._let_folders_go()
        with oserrors.translating(f"cannot open {self.path}"):
            self._put(os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self._is_held = True

    def hold_folder(self, name: str) -> None:
        """Hold a folder too: no path into it leads through a mount. Raises `NotFound`, `FolderMountedOver`."""
        folder = self._folders.setdefault(name, HeldDirectory(f"{self.path}/{name}"))
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with oserrors.translating(f"cannot open {folder.path}"):
            fd = os.open(name, flags, dir_fd=self.descriptor())
            if syscalls.mount_at("", directory=fd).is_root:
                os.close(fd)
                raise errors.PeerUnavailable.named(
                    "FolderMountedOver",
                    f"{folder.path} is a mount point",
                    why="its files are below what is mounted there",
                    hint="unmount it; if the files are in the mount, "
                    "stop the program first, and move them into the folder",
                )
            folder._put(fd)
        folder._is_held = True

    def let_go(self) -> None:
        """Hold nothing, so that the filesystem can be unmounted."""
        self._let_folders_go()
        self._is_held = False
        if self._fd >= 0:
            with oserrors.translating("cannot open /dev/null"):
                self._put(os.open("/dev/null", os.O_PATH | os.O_CLOEXEC))

    def check_in_place(self) -> None:
        """Raise `DirectoryReplaced` unless the path leads to the directory that is held, and so for each folder."""
        self._check_at(self.path)
        for name, folder in self._folders.items():
            if folder._is_held:
                folder._check_at(f"/proc/self/fd/{self.descriptor()}/{name}")

    def _check_at(self, path: str) -> None:
        with oserrors.translating(f"cannot look at {self.path}"):
            held = os.stat(self.descriptor())
            try:
                found = os.stat(path)
            except FileNotFoundError as err:
                raise DirectoryReplaced(self.path) from err
        if not os.path.samestat(held, found):
            raise DirectoryReplaced(self.path)

    def descriptor(self) -> int:
        """The descriptor. Raises `DirectoryNotHeld`."""
        if not self._is_held:
            raise errors.PeerUnavailable.named(
                "DirectoryNotHeld",
                f"{self.path} is not open",
                why="it was not there, or went away",
                hint="retry",
            )
        return self._fd

    def __truediv__(self, name: str) -> "HeldPath":
        return HeldPath(self, name)

    def _let_folders_go(self) -> None:
        for folder in self._folders.values():
            folder.let_go()

    def _put(self, fd: int) -> None:
        """Have `fd` under the one number that this object ever uses.

        A thread that a hung disk delays may still use a path with that number: it must lead nowhere else.
        """
        if self._fd < 0:
            self._fd = fd
            weakref.finalize(self, os.close, fd)
            return
        try:
            os.dup2(fd, self._fd, inheritable=False)
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class HeldPath(os.PathLike[str]):
    """A name, or several of them, below a held directory."""

    directory: HeldDirectory
    name: str

    def __truediv__(self, name: str) -> "HeldPath":
        return HeldPath(self.directory, f"{self.name}/{name}")

    def __fspath__(self) -> str:
        """For a system call now. Raises `DirectoryNotHeld`."""
        first, _, rest = self.name.partition("/")
        folder = self.directory._folders.get(first)
        if folder is not None and folder._is_held:
            return f"/proc/self/fd/{folder._fd}/{rest or '.'}"
        return f"/proc/self/fd/{self.directory.descriptor()}/{self.name}"

    def __str__(self) -> str:
        """For people."""
        return f"{self.directory.path}/{self.name}"


AnyPath: TypeAlias = str | os.PathLike[str]

Place: TypeAlias = pathlib.Path | HeldPath
"""A path that is used with `/`, `os.fspath` and `str`."""
