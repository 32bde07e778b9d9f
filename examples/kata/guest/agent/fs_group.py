"""fsGroup: give a tree to a group as the kubelet does (pkg/volume/volume_linux.go), safely inside the guest.

Every entry gets the group; mode |= 0660 (0440 read-only), directories also |= 02110. A link itself gets the group and
is never followed; other filesystems mounted below are skipped; the root comes last, so that OnRootMismatch does not
treat an interrupted run as a finished one. A tree may have millions of entries, so the walk is a generator: its
caller (ownership.py) pauses it for a freeze, reports its progress and may end it.

The tree is hostile: containers of the same sandbox may rename entries during the walk. Each entry is opened once
(O_PATH | O_NOFOLLOW, from its directory's descriptor), and all changes are made to that object.
"""

from __future__ import annotations

import os
import stat

from . import linux, protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

ALWAYS = "Always"
ON_ROOT_MISMATCH = "OnRootMismatch"
POLICIES = (ALWAYS, ON_ROOT_MISMATCH)

_READ_WRITE = 0o660
_READ_ONLY = 0o440
_DIRECTORY = stat.S_ISGID | 0o110
_MAX_DEPTH = 2048


def wanted_mode(mode: int, *, read_only: bool) -> int:
    """Permission bits (07777) that an entry with `mode` gets."""
    added = _READ_ONLY if read_only else _READ_WRITE
    if stat.S_ISDIR(mode):
        added |= _DIRECTORY
    return stat.S_IMODE(mode) | added


def root_matches(root: os.stat_result, gid: int, *, read_only: bool) -> bool:
    """Whether OnRootMismatch may skip the walk."""
    return root.st_gid == gid and stat.S_IMODE(root.st_mode) == wanted_mode(
        root.st_mode, read_only=read_only
    )


def walk(path: str, gid: int, policy: str, *, read_only: bool) -> Iterator[None]:
    """Apply an fsGroup to the tree at `path`; yields after each entry, and never if it is skipped.

    Faults: refused for a tree deeper than 2048. Raises OSError.
    """
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(root)
        if policy == ON_ROOT_MISMATCH and root_matches(status, gid, read_only=read_only):
            return
        yield from _below(root, status.st_dev, gid, read_only=read_only)
        _give(root, status, gid, read_only=read_only)
        yield
    finally:
        os.close(root)


def _below(root: int, device: int, gid: int, *, read_only: bool) -> Iterator[None]:
    """Visit all that is below `root`; the stack holds a directory's descriptor and its names still to do."""
    stack = [(os.dup(root), os.listdir(root))]
    try:
        while stack:
            directory, names = stack[-1]
            if not names:
                os.close(stack.pop()[0])
                continue
            child = _visit(directory, names.pop(), device, gid, read_only=read_only)
            if child is not None:
                stack.append((child, os.listdir(child)))
                _check_depth(len(stack))
            yield
    finally:
        for directory, _ in stack:
            os.close(directory)


def _check_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise protocol.Fault(
            "refused",
            f"a directory is nested deeper than {_MAX_DEPTH} levels",
            "remove it, or leave fsGroup unset for this volume",
        )


def _visit(directory: int, name: str, device: int, gid: int, *, read_only: bool) -> int | None:
    """Change one entry; returns a descriptor if it is a directory to descend into."""
    try:
        entry = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(entry)
        if status.st_dev != device:
            return None
        _give(entry, status, gid, read_only=read_only)
        if not stat.S_ISDIR(status.st_mode):
            return None
        return os.open(f"/proc/self/fd/{entry}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(entry)


def _give(entry: int, status: os.stat_result, gid: int, *, read_only: bool) -> None:
    if status.st_gid != gid:
        linux.chown_entry(entry, -1, gid)
    if stat.S_ISLNK(status.st_mode):
        return
    # After chown, which clears set-id bits; through /proc because fchmod(2) refuses an O_PATH descriptor.
    mode = wanted_mode(status.st_mode, read_only=read_only)
    if mode != stat.S_IMODE(status.st_mode) or status.st_gid != gid:
        os.chmod(f"/proc/self/fd/{entry}", mode)
