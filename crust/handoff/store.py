"""The proxy's side of the handoff directory: entries are created, changed and removed atomically.

    write      build the entry in a dot-directory, fsync, rename it to its name, fsync the root
    rewrite    replace mountInfo.json by rename; the entry, its lock and its claim stay
    unpublish  take the claim lock, let the caller work, rename the entry away, clear its target, then delete it

The removal is one rename too, so no reader finds a partial entry, and no later publish finds remains of it. After a
crash such remains have dot-names: readers ignore them, and `remove_orphans` deletes them. If an entry's target was
not clear yet, its name says so, and the target is cleared first: otherwise an entry could stay that no CO knows,
because a restarted kubelet takes only a mount point for a volume. One process writes records (the proxy, which holds
the lock in the root); any number of processes read. Reading takes no lock. Functions block: a caller uses one thread
hop for each.

The store neither uses nor deletes a directory that belongs to another user or that others may write to, nor an
unreadable record.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from crust.core import errors, volumes
from crust.handoff import claims, layout
from crust.handoff import entry as entries
from crust.handoff.claims import NotPublished
from crust.handoff.entry import Entry, UnknownHandoffFile
from crust.handoff.layout import Layout, UntrustedDirectory
from crust.handoff.mount_info_models import reserved
from crust.handoff.record import LIMIT_BYTES, Record
from crust.host.files import durable, listing, locks
from crust.host.process import syscalls

__all__ = ["Entry", "EntryDiffers", "Removal", "Store", "UnknownHandoffFile", "UntrustedDirectory"]

_log = logging.getLogger(__name__)

Clear = Callable[[volumes.TargetPath], None]
"""Removes the guard mount and the directory of an entry from its target. Idempotent."""


class EntryDiffers(errors.Conflict):
    def __init__(self, present: Record) -> None:
        super().__init__(
            f"{present.target} is published already",
            why=f"volume {present.key} is published to {present.handler} there, from {present.shown_source}",
        )


@dataclass(eq=False)
class Removal(contextlib.AbstractContextManager["Removal"]):
    """The removal of an entry, with its claim lock held: no sandbox has the volume, and none can claim it meanwhile.

    A block that ends without `complete` leaves the entry as it is, with its dead claim; a retry unpublishes it.
    """

    _lock: claims.ClaimLock
    entry: Entry
    _layout: Layout
    has_ended: bool
    """Whether the process of a dead claim was seen to have ended; false if none is known."""

    def complete(self, clear: Callable[[], None] | None = None) -> None:
        """Remove the entry, and clear its target meanwhile. If that fails, the entry is there again.

        If the process dies after the rename, `remove_orphans` does the rest.
        """
        directory = self._lock.paths.directory
        gone_path = self._layout.new_gone(self._lock.paths.digest, is_target_clear=clear is None)
        with syscalls.translating(f"cannot unpublish {directory}"):
            os.rename(directory, gone_path)
        try:
            durable.sync_directory(self._layout.root)
            if clear is not None:
                clear()
        except BaseException:
            _put_back(gone_path, directory)
            raise
        self._lock.forget()
        _delete_files(gone_path)

    def settle(self) -> None:
        """Remove the dead claim while the entry stays: nothing uses the device."""
        self._lock.settle()

    def close(self) -> None:
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.close()


class Store:
    """The handoff directory at `root`. Its writer makes one call at a time that changes an entry."""

    def __init__(self, root: str = layout.DEFAULT_ROOT) -> None:
        self.root = root
        self.layout = Layout(root)

    def open(self) -> None:
        """Create the root, 0700, with its parents; `UntrustedFile` if others may write it."""
        with syscalls.translating(f"cannot create {self.root}"):
            os.makedirs(os.path.dirname(self.root), mode=0o755, exist_ok=True)
        durable.make_directory(self.root, layout.DIRECTORY_MODE)

    def lock(self) -> locks.ProcessLock:
        """Become the directory's writer until the lock is closed; raises `locks.LockHeld`. The root must be open."""
        return locks.ProcessLock.acquire(f"{self.root}/{layout.WRITER_LOCK}")

    def write(self, record: Record) -> Entry:
        """Make the entry of the record, or change its record; returns the entry that exists afterwards.

        The same mount again changes nothing. A driver may answer the same request otherwise (attached again, grown,
        other defaults): then the record is replaced. While a sandbox has the volume its record stays but for the
        size, and another source is refused. The limits stay: a retry may bring older limits. Raises `EntryDiffers` if
        another request has made the entry, `HeldBySandbox`, and `UnreadableHandoffRecord`.
        """
        entry = self.read(record.target)
        if entry is None:
            return self.create(record)
        present = entry.require()
        if not present.same_publish(record.key, record.crust.request):
            raise EntryDiffers(present)
        mount = replace(record.mount, io_limits=present.mount.io_limits)
        is_same_source = present.same_source(record)
        if entry.live and is_same_source:
            mount = replace(
                present.mount,
                source=mount.source,
                capacity_bytes=mount.capacity_bytes,
                content_generation=mount.content_generation,
            )
        if mount == present.mount:
            return entry
        if entry.live and is_same_source:
            return self.rewrite(entry, mount)
        with self.begin_removal(record.target) as removal:
            if not is_same_source:
                removal.settle()
            return self.rewrite(removal.entry, mount, record)

    def create(self, record: Record) -> Entry:
        """Write a new entry, which the caller has just read as absent; raises `durable.PathAlreadyExists`."""
        data = record.to_bytes()
        paths = self.layout.entry(record.target)
        if layout.directory_exists(paths.directory):
            # an entry without a record counts as absent (H-11), and the new entry needs its name
            with contextlib.suppress(NotPublished), self.begin_removal(record.target) as incomplete:
                incomplete.complete()
        staging = self.layout.new_staging(paths.digest)
        durable.make_staging(staging, layout.DIRECTORY_MODE)
        try:
            _create_lock(f"{staging}/{layout.CLAIM_LOCK}")
            durable.write_staged(f"{staging}/{layout.RECORD}", data, mode=layout.FILE_MODE)
            durable.publish_directory(staging, paths.directory)
        except errors.CrustError:
            _delete_files(staging)
            raise
        return Entry(paths.digest, paths.directory, record)

    def rewrite(
        self, entry: Entry, mount: volumes.DeferredMount, record: Record | None = None
    ) -> Entry:
        """Change the mount of an entry that the same thread has just read. A sandbox may have claimed it.

        `record` takes the place of the present one, whose keys of a later version stay otherwise. Returns the entry
        with the record's new generation.
        """
        present = entry.require()
        generation = present.crust.generation + 1
        new = (record or present).replaced(mount, generation=generation)
        paths = self.layout.entry(new.target)
        durable.write_file(paths.record, new.to_bytes(), mode=layout.FILE_MODE)
        claims.touch(paths)
        return replace(entry, record=new)

    def read(self, target: volumes.TargetPath) -> Entry | None:
        """The entry of a target path; None if there is none. A record that cannot be read is in `Entry.error`."""
        return entries.read(self.layout.entry(target))

    def find_record(self, target: volumes.TargetPath) -> Record | None:
        """The record of a target path; None if there is none. Raises the error of one that cannot be read."""
        return entries.find_record(self.layout.entry(target))

    def scan(self) -> tuple[Entry, ...]:
        """All entries by name: readable ones, unreadable ones with the error, and unknown names."""
        return tuple(entries.scan(self.layout))

    def begin_removal(self, target: volumes.TargetPath) -> Removal:
        """Take the claim lock, so that no sandbox can claim the volume until the result is closed.

        Raises `NotPublished`; `HeldBySandbox` with the sandbox's name while a sandbox has the volume, also without
        the lock (`claims.HypervisorLives`); `NotSeen` if that was not seen; `UnreadableHandoffRecord` for a dead
        claim that cannot be read.
        """
        paths = self.layout.entry(target)
        try:
            lock = claims.ClaimLock.acquire(paths, target)
        except NotPublished:
            if not layout.directory_exists(paths.directory):
                raise
            # Somebody removed the lock file, so a holder is not visible any more. Safe only if the entry was never
            # claimed.
            if any(map(listing.exists, (paths.claim, paths.dead_claim))):
                raise errors.Corrupt.named(
                    "ClaimLockMissing",
                    f"the entry {paths.directory} cannot be locked",
                    why=f"{layout.CLAIM_LOCK} was removed, so it is unknown whether the sandbox of "
                    f"{layout.CLAIM} still runs",
                    hint=f"make sure that it does not run, then remove {layout.CLAIM}",
                ) from None
            _create_lock(paths.claim_lock)
            lock = claims.ClaimLock.acquire(paths, target)
        try:
            has_ended = lock.check_ended(target)
            entry = entries.read(paths) or Entry(paths.digest, paths.directory, None)
        except BaseException:
            lock.release()
            raise
        # this process holds the lock that was read as a claim
        unclaimed = replace(entry, claim=None)
        return Removal(lock, unclaimed, self.layout, has_ended)

    def remove_orphans(self, clear: Clear = lambda _: None) -> tuple[str, ...]:
        """Delete entries that a crash left half-built or half-removed; returns the paths that had to be kept.

        A target that an interrupted unpublish has not cleared is cleared first; if that fails, its entry is there
        again. Directories with unknown names are kept. Only the directory's writer may call this, before it writes.
        """
        for name in listing.names(self.root):
            if (digest := layout.digest_to_clear(name)) is None:
                continue
            gone = self.layout.entry(digest, name)
            directory = self.layout.entry(digest).directory
            if listing.exists(directory):  # published again since
                continue
            try:
                data = durable.find(gone.record, limit_bytes=LIMIT_BYTES)
                if data is not None and (reservation := reserved(data, digest)) is not None:
                    clear(reservation.target)
            except errors.CrustError as error:
                extra = {"entry": digest, "error": str(error)}
                _log.error("an interrupted unpublish cannot be finished", extra=extra)
                _put_back(gone.directory, directory)
        orphans = filter(layout.is_temporary, listing.names(self.root))
        paths = [f"{self.root}/{name}" for name in orphans]
        return tuple(path for path in paths if not _delete_files(path))


def _create_lock(path: str) -> None:
    """Create the lock file of a new entry. Nobody else creates one: a claimant opens it."""
    with syscalls.translating(f"cannot create {path}"):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(path, flags, layout.FILE_MODE))


def _put_back(gone_path: str, directory: str) -> None:
    """Undo the rename of an unpublish: an existing entry must be visible."""
    with syscalls.translating(f"cannot restore {directory}"):
        os.rename(gone_path, directory)
    durable.sync_directory(os.path.dirname(directory))


def _delete_files(directory: str) -> bool:
    """Delete a directory with a temporary name, file by file; False if it had to be kept.

    Only known names are deleted, and never recursively: unknown names stay for a person to look at.
    """
    for name in listing.names(directory):
        if layout.is_unknown(name):
            continue
        # FileNotFoundError: already deleted. IsADirectoryError: crust creates none there, so it is kept.
        harmless = contextlib.suppress(FileNotFoundError, IsADirectoryError)
        with syscalls.translating(f"cannot remove {directory}/{name}"), harmless:
            os.unlink(f"{directory}/{name}")
    if kept := listing.names(directory):
        extra = {"directory": directory, "names": kept}
        _log.warning("kept a directory with unknown files", extra=extra)
        return False
    with syscalls.translating(f"cannot remove {directory}"), contextlib.suppress(FileNotFoundError):
        os.rmdir(directory)
    return True
