"""Every legal name in the handoff directory, and the directories that are trusted.

    /run/crust/volumes/                 0700 root
        <sha256 of the target path>/    0700 root; an entry, created and removed atomically
            mountInfo.json              the record, written by the proxy
            claim.lock                  created with the entry, never replaced; locked while a sandbox has the volume
            claim.json                  the claim, written by the runtime; without the lock it is a dead claim
            .claim.dead                 a dead claim, while a claimant or an unpublish that has the lock looks at it
            runtime-*                   a runtime's own files
        .writer.lock                    locked by the process that writes records
        .new-<digest>.<random>/         an entry that is being built
        .gone-<digest>.<random>/        an entry that is being removed
        .gone-<digest>.<random>.target/ the same, and its target may still have the guard mount

Readers ignore names that begin with a dot. All other names are unknown: they are reported, never interpreted and
never deleted. A reader that guesses the meaning of an unknown file makes later formats impossible.

The root and the entries belong to root or this user, and nobody else writes them (H-4). Any other directory, and a
symbolic link in its place, is reported, and neither used nor deleted. So a lock is taken, and a claim put aside, only
in a directory that was checked.
"""

import os
import re
import secrets
import stat
from dataclasses import dataclass
from typing import NamedTuple

from crust.core import errors, volumes
from crust.host.process import syscalls

DEFAULT_ROOT = "/run/crust/volumes"

RECORD = "mountInfo.json"
CLAIM = "claim.json"
CLAIM_LOCK = "claim.lock"
DEAD_CLAIM = ".claim.dead"
RUNTIME_PREFIX = "runtime-"
"""Begins a runtime's own names in an entry: nobody interprets them, and they are deleted with the entry."""

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

_DIGEST = re.compile(r"[0-9a-f]{64}")
WRITER_LOCK = ".writer.lock"
"""The lock of the process that writes records. It is in the root, so that one root has one writer (H-13)."""
_STAGING = ".new-"
_GONE = ".gone-"
_TO_CLEAR = ".target"
_GONE_TO_CLEAR = re.compile(r"\.gone-([0-9a-f]{64})\.[0-9a-f]+\.target")
_ENTRY_NAMES = frozenset({RECORD, CLAIM, CLAIM_LOCK})


class EntryPaths(NamedTuple):
    """The paths of one entry. None of them needs to exist."""

    digest: str
    root: str
    """The directory of all entries."""
    directory: str
    record: str
    """The proxy's record."""
    claim: str
    """The claim, written by the runtime."""
    dead_claim: str
    """The claim that the lock's holder has put aside (H-22). Readers ignore it while the lock is held."""
    claim_lock: str
    """The lock file of the claim."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Names below one root. No I/O."""

    root: str = DEFAULT_ROOT

    def entry(self, key: volumes.TargetPath | str, name: str = "") -> EntryPaths:
        """The entry of a target path, or of a digest (64 lower-case hex digits).

        `name`: of its directory, while it is being removed.
        """
        digest = key.digest if isinstance(key, volumes.TargetPath) else key
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"not an entry's name: {digest!r}")
        directory = f"{self.root}/{name or digest}"
        files = (f"{directory}/{file}" for file in (RECORD, CLAIM, DEAD_CLAIM, CLAIM_LOCK))
        return EntryPaths(digest, self.root, directory, *files)

    def new_staging(self, digest: str) -> str:
        """A new path for building an entry: on the same filesystem, and hidden."""
        return f"{self.root}/{_STAGING}{digest}.{secrets.token_hex(8)}"

    def new_gone(self, digest: str, *, is_target_clear: bool = True) -> str:
        """A new path to which an entry is renamed before it is deleted."""
        suffix = "" if is_target_clear else _TO_CLEAR
        return f"{self.root}/{_GONE}{digest}.{secrets.token_hex(8)}{suffix}"


def is_entry(name: str) -> bool:
    """Whether a name directly below the root is an entry's."""
    return _DIGEST.fullmatch(name) is not None


def is_unknown(name: str) -> bool:
    """Whether a name inside an entry has no meaning."""
    is_known = name in _ENTRY_NAMES or name.startswith(RUNTIME_PREFIX)
    return not (is_known or is_hidden(name))


def is_hidden(name: str) -> bool:
    """Whether readers must ignore the name."""
    return name.startswith(".")


def is_temporary(name: str) -> bool:
    return name.startswith((_STAGING, _GONE))


def digest_to_clear(name: str) -> str | None:
    """The entry's digest, if the name says that it is being removed and that its target may not be clear yet."""
    match = _GONE_TO_CLEAR.fullmatch(name)
    return match.group(1) if match else None


class UntrustedDirectory(errors.Refused):
    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} is not trusted", why=why)


def directory_exists(path: str) -> bool:
    """Whether it exists. Raises `UntrustedDirectory` unless it is a directory that only root or this user writes."""
    with syscalls.translating(f"cannot look at {path}"):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
    if not stat.S_ISDIR(status.st_mode):
        raise UntrustedDirectory(path, "it is not a directory")
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedDirectory(path, f"it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise UntrustedDirectory(path, f"others may write it, mode {mode}")
    return True
