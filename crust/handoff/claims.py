"""The runtime's side of an entry: claim.lock, which proves that a sandbox lives, and claim.json, which names it.

A claimant opens the existing lock file, takes the lock, and looks again whether the path still leads to what it
locked, because the entry may have been withdrawn meanwhile. Then it writes claim.json, atomically, as often as its
state changes; that is why the lock is on a file of its own (docs/decisions/0001). The hypervisor inherits the
locked descriptor. So: lock held = a sandbox has the volume, whatever else died; claim.json without the lock = a
dead claim.
"""

import contextlib
import datetime
import enum
import json
import os
import stat
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Literal, Self

import pydantic

from crust import errors, volumes
from crust.handoff import layout
from crust.handoff.record import UnreadableHandoffRecord, reasons
from crust.host.files import durable, ofdlocks
from crust.host.process import oserrors

LIMIT_BYTES = 16 * 1024
SCHEMA = 1
_ERROR_MAX = 2000
_ATTEMPTS = 8


class State(enum.Enum):
    """What a claimant says of itself."""

    CLAIMED = "claimed"
    """The device is held; the guest has not mounted it yet."""
    MOUNTED = "mounted"
    ERROR = "error"


class NotPublished(errors.NotFound):
    """There is no entry for the target path."""

    def __init__(self, target: volumes.TargetPath) -> None:
        super().__init__(
            f"no volume is handed over for {target}",
            why="the handoff directory has no entry for it",
            hint="publish the volume with deferral first",
        )
        self.target = target


class HeldBySandbox(errors.NotReady):
    """A sandbox has the volume, and lives; `sandbox_id` is empty while it has not written its name."""

    def __init__(self, target: volumes.TargetPath, sandbox_id: str, handler: str) -> None:
        named = f"sandbox {sandbox_id} of {handler} has it"
        unnamed = "a sandbox begins with it, or it is being withdrawn"
        super().__init__(
            f"the volume at {target} is in use",
            why=named if sandbox_id else unnamed,
            hint="stop that sandbox first" if sandbox_id else "retry",
        )
        self.target = target
        self.sandbox_id = sandbox_id
        self.handler = handler


class UntrustedLock(errors.Refused):
    """claim.lock is not the file that the proxy made."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} is not used as a lock", why=why, hint="look at who replaced it")
        self.path = path


@dataclass(frozen=True, slots=True)
class Claim:
    """What claim.json says. `live` is whether the lock was held when it was read; the file does not hold it.

    A live claim whose `sandbox_id` is empty took the lock and has not written its name yet.
    """

    sandbox_id: str
    handler: str
    state: State
    error: str
    pid: int
    claimed_at: datetime.datetime | None
    live: bool


class _ClaimModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)

    schema_version: Annotated[Literal[1], pydantic.Field(alias="schema")]
    sandbox_id: Annotated[str, pydantic.Field(min_length=1, max_length=256)]
    handler: Annotated[str, pydantic.Field(min_length=1, max_length=63)]
    state: Literal["claimed", "mounted", "error"]
    error: Annotated[str, pydantic.Field(max_length=_ERROR_MAX)] = ""
    pid: Annotated[int, pydantic.Field(ge=0, lt=2**31)]
    claimed_at: pydantic.AwareDatetime


class ClaimLock:
    """The lock of one entry, held. `fd` may be inherited; it is closed on exec unless it is passed on by name."""

    def __init__(self, fd: int, paths: layout.EntryPaths) -> None:
        self.fd = fd
        self.paths = paths

    @classmethod
    def acquire(cls, paths: layout.EntryPaths, target: volumes.TargetPath) -> Self:
        """Take the entry's lock at once or raise `HeldBySandbox`, `NotPublished`, `UntrustedLock`.

        A claim.json that is found under it is dead, and removed.
        """
        for _ in range(_ATTEMPTS):
            lock = cls._try(paths, target)
            if lock is not None:
                return lock
        raise errors.OperationPending(
            f"the volume at {target} changes",
            why="its entry was replaced again and again",
            hint="retry",
        )

    @classmethod
    def _try(cls, paths: layout.EntryPaths, target: volumes.TargetPath) -> Self | None:
        fd = _open_lock(paths.claim_lock, os.O_RDWR)
        if fd is None:
            raise NotPublished(target)
        keep = False
        try:
            if not ofdlocks.try_lock(fd):
                raise _held(paths, target)
            if _leads_to(paths.claim_lock, fd):
                durable.remove(
                    paths.claim
                )  # a dead one: from now on nobody takes it for the holder's
                keep = True
        finally:
            if not keep:
                os.close(fd)
        return cls(fd, paths) if keep else None

    def close(self) -> None:
        """Close this copy of the descriptor; the lock ends with the last copy. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def release(self) -> None:
        """Unlock, for every copy of the descriptor there may be, and close. Idempotent.

        For a lock that no hypervisor was given: closing alone would leave it with a child that some other thread is
        just starting, until that child calls exec.
        """
        if self.fd >= 0:
            ofdlocks.unlock(self.fd)
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def is_held(paths: layout.EntryPaths) -> bool:
    """Whether a sandbox (or a withdrawal) holds the entry's lock. Takes nothing; False if there is no entry."""
    fd = _open_lock(paths.claim_lock, os.O_RDONLY)
    if fd is None:
        return False
    try:
        return ofdlocks.is_locked(fd)
    finally:
        os.close(fd)


def read(paths: layout.EntryPaths) -> Claim | None:
    """The entry's claim, live or dead; None if nobody has claimed it.

    Raises `UnreadableHandoffRecord` for a claim.json that is none, and what `durable.read` raises.
    """
    live = is_held(paths)
    try:
        data = durable.read(paths.claim, limit_bytes=LIMIT_BYTES)
    except errors.NotFound as err:
        # open(2) says ENXIO of a socket, which is not "absent".
        if os.path.lexists(paths.claim):
            raise UnreadableHandoffRecord(paths.claim, "it is not a regular file") from err
        return Claim("", "", State.CLAIMED, "", 0, None, live) if live else None
    try:
        model = _ClaimModel.model_validate_json(data)
    except pydantic.ValidationError as err:
        raise UnreadableHandoffRecord(paths.claim, reasons(err)) from err
    return Claim(
        sandbox_id=model.sandbox_id,
        handler=model.handler,
        state=State(model.state),
        error=model.error,
        pid=model.pid,
        claimed_at=model.claimed_at,
        live=live,
    )


def write(paths: layout.EntryPaths, claim: Claim) -> None:
    """Write claim.json in place of the former one. Only the lock's holder may (H-24).

    The entry's directory is touched afterwards: a watcher of the root sees that, and nothing of what happens inside.
    """
    plain = {
        "schema": SCHEMA,
        "sandbox_id": claim.sandbox_id,
        "handler": claim.handler,
        "state": claim.state.value,
        "error": claim.error[:_ERROR_MAX],
        "pid": claim.pid,
        "claimed_at": claim.claimed_at.isoformat() if claim.claimed_at else None,
    }
    data = f"{json.dumps(plain, separators=(',', ':'))}\n".encode("ascii")
    try:
        _ClaimModel.model_validate_json(data)
    except pydantic.ValidationError as err:
        raise errors.InvalidRequest("the claim cannot be written", why=reasons(err)) from err
    durable.publish(paths.claim, data)
    touch(paths)


def remove(paths: layout.EntryPaths) -> None:
    """Remove claim.json; absent is fine, and so is an entry that is gone."""
    with contextlib.suppress(errors.NotFound):
        durable.remove(paths.claim)
        touch(paths)


def touch(paths: layout.EntryPaths) -> None:
    """Make the root's watchers look at the entry again."""
    with oserrors.translating(f"cannot touch {paths.directory}"):
        os.utime(paths.directory)


def create_lock(path: str) -> None:
    """Make the lock file of a new entry."""
    with oserrors.translating(f"cannot make {path}"):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(path, flags, layout.FILE_MODE))


def _held(paths: layout.EntryPaths, target: volumes.TargetPath) -> HeldBySandbox:
    try:
        claim = read(paths)
    except errors.CrustError:  # the claim only names the holder; that there is one is certain
        claim = None
    return (
        HeldBySandbox(target, claim.sandbox_id, claim.handler)
        if claim
        else HeldBySandbox(target, "", "")
    )


def _open_lock(path: str, access: int) -> int | None:
    """The lock file, never made here; None if there is none."""
    with oserrors.translating(f"cannot open {path}"):
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
        raise UntrustedLock(path, "someone else may write it")
    if status.st_nlink > 1:
        raise UntrustedLock(path, "it has a second name")


def _leads_to(path: str, fd: int) -> bool:
    """Whether the path still names the file that was locked."""
    with oserrors.translating(f"cannot look at {path}"):
        try:
            there = os.lstat(path)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(fd))
