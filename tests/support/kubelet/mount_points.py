"""What the kubelet asks of the kernel: is this a mount point, bind this there."""

from collections.abc import Callable
from typing import Protocol


class MountPoints(Protocol):
    """Mount points of the node."""

    def is_mount_point(self, path: str) -> bool:
        """Whether something is mounted on the path."""

    def bind(self, source: str, target: str) -> None:
        """Bind a directory to another one."""

    def unmount(self, target: str) -> None:
        """Unmount what was bound."""


class FakeMountPoints:
    """Binds are kept here; `has_mount` says what others mounted, e.g. a guard mount."""

    def __init__(self, has_mount: Callable[[str], bool]) -> None:
        self._has_mount = has_mount
        self.binds: dict[str, str] = {}

    def is_mount_point(self, path: str) -> bool:
        return path in self.binds or self._has_mount(path)

    def bind(self, source: str, target: str) -> None:
        self.binds[target] = source

    def unmount(self, target: str) -> None:
        del self.binds[target]
