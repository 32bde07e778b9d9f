"""A runtime's claim on an entry: claim.lock proves that a sandbox lives, claim.json names the sandbox.

A claimant opens the existing lock file, takes the lock, and checks that the path still names the locked file, because
the proxy may have unpublished the entry meanwhile. Then it writes claim.json, atomically, whenever its state changes;
that is why the lock is on a file of its own (docs/decisions/0001). The hypervisor inherits the locked descriptor. So
a held lock means that a sandbox has the volume, even if other processes have died. claim.json without the lock is a
dead claim.
"""

import contextlib
import datetime
import enum
import fcntl
import json
import os
import stat
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import pydantic

from crust.core import errors, volumes
from crust.handoff import layout
from crust.handoff.record import UnreadableHandoffRecord, reasons
from crust.host.files import durable, locks
from crust.host.process import open_files, syscalls

LIMIT_BYTES = 16 * 1024
SCHEMA = 1
_ERROR_MAX = 2000
ORPHANED = "[SandboxOrphaned]"
"""So begins the error of a claim whose runtime has lost the sandbox, while its hypervisor runs."""
_ATTEMPTS = 8


class State(enum.Enum):
    """The state of a claim, as its holder reports it."""

    CLAIMED = "claimed"
    """The claimant holds the device; the guest has not mounted it yet."""
    MOUNTED = "mounted"
    ERROR = "error"


class NotPublished(errors.NotFound):
    """No deferred volume is published at the target path."""

    def __init__(self, target: volumes.TargetPath | str) -> None:
        super().__init__(
            f"no deferred volume is published at {target}",
            why="the handoff directory has no entry for it",
            hint="publish it with deferral first",
        )


class HeldBySandbox(errors.NotReady):
    """A live sandbox has the volume. `sandbox_id` is empty until the sandbox has written claim.json."""

    def __init__(
        self, target: volumes.TargetPath, sandbox_id: str, handler: str, pid: int = 0
    ) -> None:
        named = f"sandbox {sandbox_id} of {handler} has it, for which process {pid} answers"
        unnamed = "a sandbox is claiming it, or it is being unpublished"
        stop = (
            "stop that sandbox first; if its runtime does not know it any more, the virtual machine runs alone: "
            "`crust end-orphan` checks that, and ends it"
        )
        super().__init__(
            f"the volume at {target} is in use",
            why=named if sandbox_id else unnamed,
            hint=stop if sandbox_id else "retry",
        )
        self.target = target
        self.sandbox_id = sandbox_id
        self.handler = handler


class UntrustedLock(errors.Refused):
    """claim.lock is not the file that the proxy created."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} is not used as a lock", why=why, hint="find out who replaced it")
        self.path = path


@dataclass(frozen=True, slots=True)
class Claim:
    """The content of claim.json. `live` is not in the file: it says whether the lock was held when the claim was
    read.

    A live claim with an empty `sandbox_id`: the claimant has taken the lock and has not written claim.json yet.
    """

    sandbox_id: str
    handler: str
    state: State
    error: str
    pid: int
    claimed_at: datetime.datetime | None
    live: bool
    request_id: str = ""
    """The id of the call that published the volume, if the record has it."""

    @property
    def is_orphaned(self) -> bool:
        """Whether the runtime says that it cannot stop the sandbox any more, and the hypervisor still runs (H-24)."""
        return self.state is State.ERROR and self.error.startswith(ORPHANED)


class _ClaimModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="ignore", frozen=True)

    schema_version: Annotated[Literal[1], pydantic.Field(alias="schema")]
    sandbox_id: Annotated[str, pydantic.Field(min_length=1, max_length=256)]
    handler: Annotated[str, pydantic.Field(min_length=1, max_length=63)]
    state: State
    error: Annotated[str, pydantic.Field(max_length=_ERROR_MAX)] = ""
    pid: Annotated[int, pydantic.Field(ge=0, lt=2**31)]
    claimed_at: pydantic.AwareDatetime
    request_id: Annotated[str, pydantic.Field(pattern=r"^[0-9A-Za-z-]{0,64}$")] = ""


class ClaimLock:
    """The held lock of one entry. A child may inherit `fd` by `pass_fds`; otherwise exec closes it."""

    def __init__(self, fd: int, paths: layout.EntryPaths) -> None:
        self.fd = fd
        self.paths = paths

    @classmethod
    def acquire(
        cls, paths: layout.EntryPaths, target: volumes.TargetPath, *, keep_claim: bool = False
    ) -> Self:
        """Take the entry's lock, or raise `HeldBySandbox`, `NotPublished`, `UntrustedLock` without waiting.

        A claim.json that exists by then belongs to a dead claim, and is removed. With `keep_claim` it stays for the
        caller to read (H-46), who then replaces it.
        """
        for _ in range(_ATTEMPTS):
            lock = cls._try(paths, target, keep_claim=keep_claim)
            if lock is not None:
                return lock
        raise errors.OperationPending(
            f"the entry for {target} keeps changing",
            why=f"it was replaced {_ATTEMPTS} times while a claimant tried to lock it",
            hint="retry",
        )

    @classmethod
    def _try(
        cls, paths: layout.EntryPaths, target: volumes.TargetPath, *, keep_claim: bool
    ) -> Self | None:
        fd = _open_lock(paths.claim_lock, os.O_RDWR)
        if fd is None:
            raise NotPublished(target)
        keep = False
        try:
            if not locks.try_lock(fd):
                raise _held(paths, target)
            if _is_at(paths.claim_lock, fd):
                if not keep_claim:  # a dead claim must not look like the new holder's
                    durable.remove(paths.claim)
                keep = True
        finally:
            if not keep:
                os.close(fd)
        return cls(fd, paths) if keep else None

    @classmethod
    def of_holder(cls, paths: layout.EntryPaths, pid: int) -> Self | None:
        """A copy of the lock that the process holds; None if it does not hold the entry's lock.

        Setting a lock again succeeds through the description that has the lock, and fails through any other: so the
        copy proves who holds the lock, and nobody else can take it while the copy is open.
        """
        if not is_held(paths):
            return None
        copies = open_files.copies(pid, paths.claim_lock)
        with (
            syscalls.translating(f"cannot look at {paths.claim_lock}"),
            contextlib.closing(copies),
        ):
            for copy in copies:
                if _holds(copy) and _is_at(paths.claim_lock, copy):
                    return cls(copy, paths)
                os.close(copy)
        return None

    def close(self) -> None:
        """Close this copy of the descriptor; the lock ends with the last copy. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def release(self) -> None:
        """Unlock, for all copies of the descriptor, and close. Idempotent.

        For a lock that no hypervisor has: if another thread is just starting a child, that child has a copy until it
        calls exec, so closing alone would not unlock.
        """
        if self.fd >= 0:
            locks.unlock(self.fd)
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_held(paths: layout.EntryPaths) -> bool:
    """Whether a sandbox (or an unpublish) holds the entry's lock; false without an entry. Takes no lock."""
    fd = _open_lock(paths.claim_lock, os.O_RDONLY)
    if fd is None:
        return False
    try:
        return locks.is_locked(fd)
    finally:
        os.close(fd)


def read(paths: layout.EntryPaths) -> Claim | None:
    """The entry's claim, live or dead; None if there is no claim.

    Raises `UnreadableHandoffRecord` for an invalid claim.json, and the errors of `durable.find`.
    """
    live = is_held(paths)
    data = durable.find(paths.claim, limit_bytes=LIMIT_BYTES)
    if data is None:
        return Claim("", "", State.CLAIMED, "", 0, None, live) if live else None
    try:
        model = _ClaimModel.model_validate_json(data)
    except pydantic.ValidationError as err:
        raise UnreadableHandoffRecord(paths.claim, reasons(err)) from err
    return Claim(**model.model_dump(exclude={"schema_version"}), live=live)


def write(paths: layout.EntryPaths, claim: Claim) -> None:
    """Replace claim.json. Only the holder of the lock may do this (H-24).

    Afterwards the entry's directory is touched: a watch of the root sees that, and sees no change inside the entry.
    """
    plain = {
        "schema": SCHEMA,
        "sandbox_id": claim.sandbox_id,
        "handler": claim.handler,
        "state": claim.state.value,
        "error": claim.error[:_ERROR_MAX],
        "pid": claim.pid,
        "claimed_at": claim.claimed_at.isoformat() if claim.claimed_at else None,
        **({"request_id": claim.request_id} if claim.request_id else {}),
    }
    data = f"{json.dumps(plain, separators=(',', ':'))}\n".encode("ascii")
    try:
        _ClaimModel.model_validate_json(data)
    except pydantic.ValidationError as err:
        raise errors.InvalidRequest("the claim cannot be written", why=reasons(err)) from err
    durable.write_file(paths.claim, data)
    touch(paths)


def remove(paths: layout.EntryPaths) -> None:
    """Remove claim.json. OK if it or the entry is absent."""
    with contextlib.suppress(errors.NotFound):
        durable.remove(paths.claim)
        touch(paths)


def touch(paths: layout.EntryPaths) -> None:
    """Notify watches of the root that the entry has changed."""
    with syscalls.translating(f"cannot touch {paths.directory}"):
        os.utime(paths.directory)


def _held(paths: layout.EntryPaths, target: volumes.TargetPath) -> HeldBySandbox:
    try:
        claim = read(paths)
    except errors.CrustError:  # only the holder's name is missing then; the held lock is certain
        claim = None
    return (
        HeldBySandbox(target, claim.sandbox_id, claim.handler, claim.pid)
        if claim
        else HeldBySandbox(target, "", "")
    )


def _open_lock(path: str, access: int) -> int | None:
    """Open the lock file, never create it; None if there is none."""
    with syscalls.translating(f"cannot open {path}"):
        try:
            fd = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
    try:
        _check_lock(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_lock(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedLock(path, "it is not a regular file")
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise UntrustedLock(path, "other users may write to it")
    if status.st_nlink > 1:
        raise UntrustedLock(path, "it has a second hard link")


def _holds(fd: int) -> bool:
    """Whether the description behind `fd` has the lock, which the caller knows to be held by somebody."""
    is_writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    return is_writable and locks.try_lock(fd)


def _is_at(path: str, fd: int) -> bool:
    """Whether the path still names the locked file."""
    with syscalls.translating(f"cannot look at {path}"):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        return os.path.samestat(status, os.fstat(fd))
