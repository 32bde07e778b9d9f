"""One name in the handoff directory, as it is found: a record, or the reason why it is none.

Reading takes no lock and changes nothing. "Absent" is said of what is not there, and of a directory without a record
(H-11); whatever else cannot be read is an entry with an error, because unknown is not absent.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from crust import errors
from crust.handoff import claims, layout
from crust.handoff import record as records
from crust.handoff.claims import Claim
from crust.handoff.layout import EntryPaths, Layout
from crust.handoff.record import Record
from crust.host.files import durable
from crust.host.process import oserrors


class UntrustedDirectory(errors.Refused):
    """A directory of the handoff that someone else owns or could write."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} is not trusted",
            why=why,
            hint="find out who made it; nothing in it is used or deleted",
        )
        self.path = path


class UnknownHandoffFile(errors.Corrupt):
    """A name that no rule gives a meaning."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} has no meaning here",
            why="it is no entry's name",
            hint="it is kept; move it away",
        )
        self.path = path


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in the root, as it was read: a readable record, or the reason why it is none.

    `claim_error` tells why claim.json could not be read; the record is good all the same. `unknown` are names inside
    the entry that are nobody's. `digest` is the entry's name, and for a name that is nobody's that name.
    """

    digest: str
    directory: str
    record: Record | None
    error: errors.CrustError | None = None
    claim: Claim | None = None
    claim_error: errors.CrustError | None = None
    unknown: tuple[str, ...] = ()

    @property
    def live(self) -> bool:
        """Whether a sandbox has the volume now."""
        return self.claim is not None and self.claim.live

    def require(self) -> Record:
        """The record; raises the reason why there is none."""
        if self.record is not None:
            return self.record
        raise self.error or UnknownHandoffFile(self.directory)


def read(paths: EntryPaths) -> Entry | None:
    """The entry, readable or not; None if it is absent."""
    try:
        os.lstat(
            paths.directory
        )  # most often there is none, and an error of ours costs more than the look
    except FileNotFoundError:
        return None
    except OSError:
        pass  # told below
    try:
        check_directory(paths.directory)
        record = _read_record(paths)
    except errors.NotFound:
        return None  # no directory, or one without a record: absent by H-11
    except errors.CrustError as error:
        return Entry(paths.digest, paths.directory, None, error, *_claim_of(paths))
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
    """Raise `NotFound` if it is absent, `UntrustedDirectory` if it is not a directory that only we can write."""
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
        # open(2) says ENXIO of a socket, which is not "absent".
        if os.path.lexists(paths.record):
            raise records.UnreadableHandoffRecord(paths.record, "it is not a regular file") from err
        raise
    return records.parse(data, path=paths.record, digest=paths.digest)


def _claim_of(paths: EntryPaths) -> tuple[Claim | None, errors.CrustError | None]:
    try:
        return claims.read(paths), None
    except errors.CrustError as error:
        return None, error
