"""What the kernel knows of a target path without asking a disk or a file server: from its caches, so it never blocks.

False means not known: use `crust.host.files.target_paths` on a thread then.
"""

import os
from collections.abc import Sequence

from crust.host.process import syscalls
from crust.volumes import TargetPath


def is_known_free(target: TargetPath, roots: Sequence[str]) -> bool:
    """Whether the kernel can say, from its caches, that no link leads to the parent and that no mount is on top.

    It never blocks. False means not known: use `open_parent` and look at the mounts.
    """
    root = next((root for root in roots if target.is_below(root)), None)
    if root is None:
        return False
    above, _, name = target.text[len(root.rstrip("/")) + 1 :].rpartition("/")
    try:
        parent = _open_cached(root, above)
    except OSError:
        return False
    try:
        return _is_free_child(parent, name)
    except OSError:
        return False
    finally:
        os.close(parent)


def is_known_linkless(target: TargetPath, roots: Sequence[str]) -> bool:
    """Whether the kernel can say, from its caches, that the parent is there and no link below a root leads to it.

    It never blocks. False means not known.
    """
    root = next((root for root in roots if target.is_below(root)), None)
    if root is None:
        return False
    above, _, _ = target.text[len(root.rstrip("/")) + 1 :].rpartition("/")
    try:
        os.close(_open_cached(root, above))
    except OSError:
        return False
    return True


def _open_cached(root: str, above: str) -> int:
    directory = syscalls.open_cached_root(root)
    if not above:
        return directory
    try:
        return syscalls.open_cached_beneath(directory, above)
    finally:
        os.close(directory)


def _is_free_child(parent: int, name: str) -> bool:
    try:
        child = syscalls.open_cached_child(parent, name)
    except FileNotFoundError:
        return True
    try:
        return not syscalls.is_mount_root(child)
    finally:
        os.close(child)
