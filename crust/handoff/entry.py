"""One name in the handoff directory as it was read: a record, or the error that says why there is none.

Reading takes no lock and changes nothing. A missing directory, and a directory without a record (H-11), are absent.
Anything else that cannot be read is an entry with an error, because an unknown volume is not an absent one.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from crust.core import errors
from crust.handoff import claims, layout
from crust.handoff import record as records
from crust.handoff.claims import Claim
from crust.handoff.layout import EntryPaths, Layout
from crust.handoff.record import Record, Reserved
from crust.host.files import durable
from crust.host.process import oserrors


class UntrustedDirectory(errors.Refused):
    """A directory of the handoff belongs to another user, or others may write to it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} is not trusted",
            why=why,
            hint="find out who created it; crust neither uses nor deletes anything in it",
        )
        self.path = path


class UnknownHandoffFile(errors.Corrupt):
    """The handoff directory holds a file or directory with a name that the specification does not define."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} has no meaning in the handoff directory",
            why="the specification does not define this name",
            hint="crust keeps it; move it away",
        )
        self.path = path


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in the root as it was read: a readable record, or the error.

    `claim_error` says why claim.json could not be read; the record is valid all the same. `unknown` are unknown names
    inside the entry. `digest` is the entry's name; for an unknown name it is that name. `reserved` is what an
    entry that cannot be read blocks: that volume and device; None then blocks everything.
    """

    digest: str
    directory: str
    record: Record | None
    error: errors.CrustError | None = None
    claim: Claim | None = None
    claim_error: errors.CrustError | None = None
    unknown: tuple[str, ...] = ()
    reserved: Reserved | None = None

    @property
    def live(self) -> bool:
        """Whether a sandbox has the volume now."""
        return self.claim is not None and self.claim.live

    def require(self) -> Record:
        """The record; raises the error if there is none."""
        if self.record is not None:
            return self.record
        raise self.error or UnknownHandoffFile(self.directory)


def read(paths: EntryPaths) -> Entry | None:
    """The entry, readable or not; None if it is absent."""
    try:
        os.lstat(
            paths.directory
        )  # usually it is absent, and creating a CrustError costs more than this call
    except FileNotFoundError:
        return None
    except OSError:
        pass  # reported below
    try:
        check_directory(paths.directory)
        record = _read_record(paths)
    except errors.NotFound:
        return None  # no directory, or one without a record: absent by H-11
    except errors.CrustError as error:
        claim, claim_error = _claim_of(paths)
        held = None if isinstance(error, UntrustedDirectory) else reserved_by(paths)
        return Entry(paths.digest, paths.directory, None, error, claim, claim_error, reserved=held)
    unknown = tuple(
        name
        for name in names(paths.directory)
        if layout.kind_in_entry(name) is layout.NameKind.UNKNOWN
    )
    claim, claim_error = _claim_of(paths)
    return Entry(paths.digest, paths.directory, record, None, claim, claim_error, unknown)


def scan(root: Layout) -> Iterator[Entry]:
    """Everything visible in the root, by name; nothing if there is no root."""
    for name in names(root.root):
        kind = layout.kind_in_root(name)
        path = f"{root.root}/{name}"
        if kind is layout.NameKind.UNKNOWN:
            yield Entry(name, path, None, UnknownHandoffFile(path))
        elif kind is layout.NameKind.LEGAL:
            entry = read(root.entry(name))
            if entry is not None:
                yield entry


def names(directory: str) -> list[str]:
    """The names in a directory, sorted; none if it is not there."""
    with oserrors.translating(f"cannot list {directory}"):
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []


def check_directory(path: str) -> None:
    """Raise `NotFound` if it is absent, `UntrustedDirectory` unless it is a directory that only root or this user
    writes.
    """
    with oserrors.translating(f"cannot look at {path}"):
        status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise UntrustedDirectory(path, "it is not a directory")
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedDirectory(path, f"it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedDirectory(
            path, f"others may write it, mode {stat.S_IMODE(status.st_mode):04o}"
        )


def _read_record(paths: EntryPaths) -> Record:
    try:
        data = durable.read(paths.record, limit_bytes=records.LIMIT_BYTES)
    except errors.NotFound as err:
        # open(2) fails with ENXIO for a socket, which is not absent.
        if os.path.lexists(paths.record):
            raise records.UnreadableHandoffRecord(paths.record, "it is not a regular file") from err
        raise
    return records.parse(data, path=paths.record, digest=paths.digest)


def reserved_by(paths: EntryPaths) -> Reserved | None:
    """What an entry reserves, as far as its record says it, of whatever version; None: nobody can know."""
    try:
        data = durable.read(paths.record, limit_bytes=records.LIMIT_BYTES)
    except errors.CrustError:
        return None
    return records.reserved(data, paths.digest)


def _claim_of(paths: EntryPaths) -> tuple[Claim | None, errors.CrustError | None]:
    try:
        return claims.read(paths), None
    except errors.CrustError as error:
        return None, error
