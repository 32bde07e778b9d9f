"""From a mount of the OCI bundle to the volume that is meant, or the certainty that none is.

A mount source is the target path of a publish, or a path below one (subPath, concatenated by the CO: KEP-2857), or
a bind that a kubelet made under volume-subpaths, or either of them behind a symbolic link, because containerd
resolves links before it writes the bundle. The first two are look-ups by digest. For the others the kernel is asked:
every deferred target carries a sealed tmpfs of its own, so whatever lies on that filesystem belongs to that target.

Three answers, never two: resolved; not deferred; or an error. An entry that cannot be read, or a sealed directory
without an entry, is an error, since a runtime that shares the host's directory instead loses people's data.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from crust import errors, volumes
from crust.handoff import store
from crust.handoff.record import Record
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import oserrors


class GuardWithoutEntry(errors.NotReady):
    """The directory is prepared for a deferred volume, and no entry says which."""

    def __init__(self, source: str, target: str) -> None:
        super().__init__(
            f"the mount source {source} cannot be used",
            why=f"{target} awaits a deferred volume, and the handoff directory has no readable entry for it",
            hint="the CO must publish the volume again, e.g. after a restart of the node; see `crust volumes`",
        )
        self.source = source
        self.target = target


@dataclass(frozen=True, slots=True)
class Resolved:
    """The source means a deferred volume, and of it `sub_path`: relative, "" for all of it.

    `sub_path` is text that nobody has looked up: resolve it in the guest, and not through links out of the volume.
    """

    record: Record
    sub_path: str


@dataclass(frozen=True, slots=True)
class NotDeferred:
    """The source is no deferred volume: handle it as any other mount."""

    source: str


def resolve_source(root: str, source: str) -> Resolved | NotDeferred:
    """What the OCI mount source `source` means, given the handoff directory at `root`.

    Raises `GuardWithoutEntry`, and the entry's own error when there is one that cannot be read; `InvalidRequest`
    for a source that is no path at all.
    """
    if "\0" in source:
        raise errors.InvalidRequest("the mount source cannot be used", why="it has a NUL in it")
    if not source.startswith("/"):
        return NotDeferred(source)  # tmpfs, proc, shm: names, not paths
    entries = store.Store(root)
    plain = os.path.normpath(source)
    with oserrors.translating(f"cannot look at {source}"):
        real = os.path.realpath(source)
    found = _by_name(entries, plain) or _by_name(entries, real) or _by_seal(entries, source, real)
    return found or NotDeferred(source)


def _by_name(entries: store.Store, path: str) -> Resolved | None:
    for target in _prefixes(path):
        entry = entries.read(target)
        if entry is not None:
            return Resolved(entry.require(), path[len(target.text) + 1 :])
    return None


def _prefixes(path: str) -> Iterator[volumes.TargetPath]:
    """The path and every directory above it, the longest first; "/" is nobody's target."""
    while len(path) > 1:
        with contextlib.suppress(
            volumes.InvalidPath
        ):  # too long as a whole: what is above may be a target
            yield volumes.TargetPath.parse(path)
        path = os.path.dirname(path)


def _by_seal(entries: store.Store, source: str, real: str) -> Resolved | None:
    seal = _mount_of(real)
    if seal is None or not mount_api.is_guard(seal):
        return None
    for entry in entries.scan():
        if entry.record is not None and _is_on(entry.record.target.text, seal):
            inside = os.path.join(seal.root, os.path.relpath(real, seal.target))
            return Resolved(entry.record, _relative(os.path.normpath(inside)))
    raise GuardWithoutEntry(source, seal.target)


def _mount_of(path: str) -> mountinfo.Mount | None:
    """The mount that `path`, free of links, lies on: the deepest, and of those on one directory the topmost."""
    found = None
    for mount in mountinfo.read_all():
        covers = path == mount.target or path.startswith(mount.target.rstrip("/") + "/")
        if covers and (found is None or len(mount.target) >= len(found.target)):
            found = mount
    return found


def _is_on(target: str, seal: mountinfo.Mount) -> bool:
    try:
        return os.stat(target).st_dev == os.makedev(seal.major, seal.minor)
    except OSError:  # an entry whose target is gone says nothing about this source
        return False


def _relative(path: str) -> str:
    return path.lstrip("/")
