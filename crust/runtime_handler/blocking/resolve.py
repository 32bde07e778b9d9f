"""Finds the deferred volume that a mount of the OCI bundle names, or establishes that it names none.

A mount source is the target path of a publish; or a path below a target (subPath, joined by the CO: KEP-2857); or a
bind that a kubelet made under volume-subpaths; or a path of these behind a symbolic link, because containerd resolves
links before it writes the bundle. The digest finds the first two. For the others this module asks the kernel: every
deferred target has a guard mount of its own, so a path on that filesystem belongs to that target.

The result is one of three: resolved, not deferred, or an error. An unreadable entry, and a guard mount without an
entry, are errors: a runtime that shared the host's directory instead would lose data.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

from crust.core import errors, volumes
from crust.handoff import store
from crust.handoff.record import Record
from crust.host import answers
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import syscalls


@dataclass(frozen=True, slots=True)
class Resolved:
    """The source names a deferred volume and a path in it: `sub_path`, relative, "" for the whole volume.

    `sub_path` is unchecked text: resolve it in the guest, and do not follow links out of the volume.
    """

    record: Record
    sub_path: str

    def require_whole(self) -> Record:
        """The record, for a runtime that can only mount whole volumes. Raises `SubPathUnsupported`."""
        if self.sub_path:
            raise errors.NotReady.named(
                "SubPathUnsupported",
                f"{self.sub_path!r} of the volume at {self.record.target} cannot be mounted",
                why=f"{self.record.handler} mounts whole volumes only",
            )
        return self.record


@dataclass(frozen=True, slots=True)
class NotDeferred:
    """The source is not a deferred volume: treat it as any other mount."""

    source: str


def resolve_source(root: str, source: str) -> Resolved | NotDeferred:
    """Resolve the source of a bind mount, with the handoff directory at `root`.

    A mount is a bind if its type is "bind", or "bind" or "rbind" is among its options; the source of another mount
    ("tmpfs", "proc") is no path. Raises `GuardWithoutEntry`, `NotSeen`, the error of an unreadable entry;
    `InvalidRequest` for a source that holds a NUL byte, or is relative: the bundle is its directory, not this
    process's.
    """
    if "\0" in source:
        raise errors.InvalidRequest("the mount source cannot be used", why="it holds a NUL byte")
    if not source.startswith("/"):
        raise errors.InvalidRequest(
            f"the mount source {source!r} cannot be used",
            why="it is relative",
            hint="join it to the directory of the OCI bundle; a mount that is no bind has no source to resolve",
        )
    entries = store.Store(root)
    plain = os.path.normpath(source)
    with syscalls.translating(f"cannot look at {source}"):
        real = os.path.realpath(source)
    resolved = _by_name(entries, plain)
    if resolved is None and real != plain:
        resolved = _by_name(entries, real)
    if resolved is not None:
        return resolved
    guard = mountinfo.holding(real)
    if guard is None or not mount_api.is_guard(guard):
        return NotDeferred(source)
    for entry in entries.scan():
        if entry.record is not None and _is_on(entry.record.target.text, guard):
            inside = os.path.join(guard.root, os.path.relpath(real, guard.target))
            return Resolved(entry.record, os.path.normpath(inside).lstrip("/"))
    raise errors.NotReady.named(
        "GuardWithoutEntry",
        f"the mount source {source} cannot be used",
        why=f"{guard.target} awaits a deferred volume, and the handoff directory has no readable entry for it",
    )


def _by_name(entries: store.Store, path: str) -> Resolved | None:
    for target in _prefixes(path):
        record = entries.find_record(target)
        if record is not None:
            return Resolved(record, path[len(target.text) + 1 :])
    return None


def _prefixes(path: str) -> Iterator[volumes.TargetPath]:
    """The path and every directory above it, the longest first, without "/"."""
    while len(path) > 1:
        # the whole path is too long, but a directory above may be a target
        with contextlib.suppress(volumes.InvalidPath):
            yield volumes.TargetPath.parse(path)
        path = os.path.dirname(path)


def _is_on(target: str, guard: mountinfo.Mount) -> bool:
    """Whether the target, which may be absent, has the guard. Raises `NotSeen`."""
    absent = (errno.ENOENT, errno.ENOTDIR)
    number = answers.ask(f"the target {target}", lambda: os.stat(target).st_dev, absent=absent)
    return answers.seen(number) == os.makedev(guard.major, guard.minor)
