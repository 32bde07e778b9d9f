"""The proxy's side of the watched directory: entries appear whole, change whole, and go whole.

    publish    build aside in a dot-directory, fsync, rename in, fsync the root
    rewrite    replace mountInfo.json by rename; the entry, its lock and its claim stay
    withdraw   take the claim lock, let the caller do its work, rename the entry out, then delete it

Going is one rename too, so no reader ever meets half of an entry, and no later publish meets its remains. What a
crash leaves has a dot-name: invisible, and removed by `sweep`. One process writes records (the proxy, by its
process lock); any number read. Reading never takes a lock. Functions block: callers hop to a thread once.

Refused, and never deleted: whatever is not owned by root or this user or is writable by others, and a record that
is not one.
"""

import contextlib
import logging
import os
from dataclasses import replace
from types import TracebackType
from typing import Self

from crust import errors, volumes
from crust.handoff import claims, layout
from crust.handoff import entry as entries
from crust.handoff.claims import Claim, NotPublished
from crust.handoff.entry import (
    Entry,
    UnknownHandoffFile,
    UntrustedDirectory,
    check_directory,
    names,
)
from crust.handoff.layout import EntryPaths, Layout
from crust.handoff.record import Record
from crust.host.files import durable
from crust.host.process import oserrors

__all__ = [
    "ClaimLockMissing",
    "Entry",
    "EntryDiffers",
    "Store",
    "UnknownHandoffFile",
    "Unpublish",
    "UntrustedDirectory",
]

_log = logging.getLogger(__name__)


class EntryDiffers(errors.Conflict):
    """The target is published already, with other content."""

    def __init__(self, there: Record) -> None:
        super().__init__(
            f"{there.target} is published already",
            why=f"volume {there.key} is handed to {there.handler} there, from {there.device}",
            hint="unpublish it first",
        )
        self.there = there


class ClaimLockMissing(errors.Corrupt):
    """An entry that was claimed has no lock file any more."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the entry {path} cannot be locked",
            why=f"{layout.CLAIM_LOCK} was removed, so nobody can tell whether the sandbox of "
            f"{layout.CLAIM} still lives",
            hint=f"make sure that it does not, then remove {layout.CLAIM}",
        )
        self.path = path


class Unpublish:
    """An entry under its claim lock: no sandbox has it, and none can get it until this is left.

    Leaving the block without `complete` leaves the entry as it is, to be withdrawn again.
    """

    def __init__(self, lock: claims.ClaimLock, entry: Entry, root: Layout) -> None:
        self._lock = lock
        self._layout = root
        self.entry = entry

    def complete(self) -> None:
        """Remove the entry. A crash after the first step leaves only what `sweep` removes."""
        gone = self._layout.new_gone(self._lock.paths.digest)
        with oserrors.translating(f"cannot withdraw {self._lock.paths.directory}"):
            os.rename(self._lock.paths.directory, gone)
        durable.sync_directory(self._layout.root)
        _delete_files(gone)

    def close(self) -> None:
        """Give the lock up."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Store:
    """The handoff directory at `root`."""

    def __init__(self, root: str = layout.DEFAULT_ROOT) -> None:
        self.layout = Layout(root)

    @property
    def root(self) -> str:
        """Path of the directory."""
        return self.layout.root

    def open(self) -> None:
        """Make the root, 0700, with its parents; raises `UntrustedDirectory` if it is not ours alone."""
        with oserrors.translating(f"cannot make {self.root}"):
            os.makedirs(os.path.dirname(self.root), mode=0o755, exist_ok=True)
        durable.make_directory(self.root, layout.DIRECTORY_MODE)
        check_directory(self.root)

    def publish(self, record: Record, *, replace: bool = False) -> Entry:
        """Make the entry appear; returns what is there now.

        The same content again changes nothing. Other content raises `EntryDiffers`, or replaces the record if
        `replace` is set and no sandbox has the volume (else `HeldBySandbox`). An unreadable record is raised, not
        replaced.
        """
        entry = self.read(record.target)
        if entry is None:
            return self.create(record)
        there = entry.require()
        if there.same_content(record):
            return entry
        if not replace:
            raise EntryDiffers(there)
        with self.begin_unpublish(record.target) as alone:
            return self._replace(record, alone.entry)

    def create(self, record: Record) -> Entry:
        """`publish` for who has just read that nothing is there; raises `durable.AlreadyExists` if something is."""
        data = record.to_bytes()
        paths = self.layout.entry(record.target)
        self._remove_incomplete(record.target, paths)
        staging = self.layout.new_staging(paths.digest)
        durable.make_staging(staging, layout.DIRECTORY_MODE)
        try:
            claims.create_lock(f"{staging}/{layout.CLAIM_LOCK}")
            durable.write_staged(f"{staging}/{layout.RECORD}", data, mode=layout.FILE_MODE)
            durable.publish_directory(staging, paths.directory)
        except errors.CrustError:
            _delete_files(staging)
            raise
        return Entry(paths.digest, paths.directory, record)

    def rewrite(self, record: Record) -> Entry:
        """Replace the record of an entry that may be claimed; returns the entry, its record's generation raised.

        Raises `NotPublished`, and `EntryDiffers` when another volume is there.
        """
        entry = self.read(record.target)
        if entry is None:
            raise NotPublished(record.target)
        there = entry.require()
        if there.key != record.key:
            raise EntryDiffers(there)
        return self._replace(record, entry)

    def read(self, target: volumes.TargetPath) -> Entry | None:
        """The entry of a target path; None if there is none. A record that cannot be read is in `Entry.error`."""
        return entries.read(self.layout.entry(target))

    def claim_state(self, target: volumes.TargetPath) -> Claim | None:
        """The claim on a target path's volume, live or dead; None without one."""
        return claims.read(self.layout.entry(target))

    def scan(self) -> tuple[Entry, ...]:
        """Everything that is visible, by name: readable, unreadable with the reason, and what is nobody's."""
        return tuple(entries.scan(self.layout))

    def begin_unpublish(self, target: volumes.TargetPath) -> Unpublish:
        """Keep every sandbox away from the volume until the withdrawal is closed.

        Raises `NotPublished`; `HeldBySandbox`, naming the sandbox, while one has it.
        """
        paths = self.layout.entry(target)
        lock = self._lock(paths, target)
        try:
            entry = entries.read(paths) or Entry(paths.digest, paths.directory, None)
        except BaseException:
            lock.release()
            raise
        unclaimed = replace(entry, claim=None)  # the lock that was seen is our own
        return Unpublish(lock, unclaimed, self.layout)

    def remove_orphans(self) -> tuple[str, ...]:
        """Remove what a crash left of entries being built or removed; returns the paths that had to be kept.

        Kept is what holds names that are nobody's. For the directory's one writer, before it publishes.
        """
        ours = filter(layout.is_temporary, names(self.root))
        return tuple(
            path for path in (f"{self.root}/{name}" for name in ours) if not _delete_files(path)
        )

    def _replace(self, record: Record, entry: Entry) -> Entry:
        new = replace(record, generation=entry.require().generation + 1)
        paths = self.layout.entry(record.target)
        durable.publish(paths.record, new.to_bytes(), mode=layout.FILE_MODE)
        claims.touch(paths)
        return replace(entry, record=new)

    def _remove_incomplete(self, target: volumes.TargetPath, paths: EntryPaths) -> None:
        """An entry's directory without a record counts as absent, and must not stay in a new entry's way."""
        if not os.path.lexists(paths.directory):
            return
        with contextlib.suppress(NotPublished), self.begin_unpublish(target) as remains:
            remains.complete()

    def _lock(self, paths: EntryPaths, target: volumes.TargetPath) -> claims.ClaimLock:
        try:
            return claims.ClaimLock.acquire(paths, target)
        except NotPublished:
            if not os.path.lexists(paths.directory):
                raise
        # Somebody removed the lock file, so whoever had it cannot be seen any more: only safe if nobody ever had it.
        check_directory(paths.directory)
        if os.path.lexists(paths.claim):
            raise ClaimLockMissing(paths.directory)
        claims.create_lock(paths.claim_lock)
        return claims.ClaimLock.acquire(paths, target)


def _delete_files(directory: str) -> bool:
    """Delete an invisible directory of ours, file by file; False if it had to be kept.

    Only names with a meaning go, never recursively: a name that is nobody's stays for a person to look at.
    """
    for name in names(directory):
        if layout.kind_in_entry(name) is layout.NameKind.UNKNOWN:
            continue
        # Gone: someone else swept it. A directory: nothing of ours is one, so it is kept.
        harmless = contextlib.suppress(FileNotFoundError, IsADirectoryError)
        with oserrors.translating(f"cannot remove {directory}/{name}"), harmless:
            os.unlink(f"{directory}/{name}")
    kept = names(directory)
    if kept:
        _log.warning("kept files that are nobody's", extra={"directory": directory, "names": kept})
        return False
    with oserrors.translating(f"cannot remove {directory}"), contextlib.suppress(FileNotFoundError):
        os.rmdir(directory)
    return True
