"""A runtime's claim on an entry: claim.lock proves that a sandbox lives, claim.json names the sandbox.

A claimant opens the existing lock file, takes the lock, and checks that the path still names the locked file, because
the proxy may have unpublished the entry meanwhile. Then it writes claim.json, atomically, whenever its state changes;
that is why the lock is on a file of its own (docs/decisions/0001). The hypervisor inherits the locked descriptor. So
a held lock means that a sandbox has the volume, even if other processes have died. claim.json without the lock is a
dead claim.

The rule: a dead claim is evidence, because a keeper can be killed while its virtual machine goes on. Taking the lock
puts claim.json aside, so that no reader takes it for the new holder's. `check_ended` refuses while its process lives.
`settle` removes it; a lock that is released before puts it back.
"""

import contextlib
import datetime
import enum
import fcntl
import json
import os
import stat
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Annotated, Literal, Self

import pydantic

from crust.core import errors, volumes
from crust.core.printable import printable
from crust.handoff import layout
from crust.handoff.record import UnreadableHandoffRecord, reasons
from crust.host import answers
from crust.host.files import durable, locks
from crust.host.process import open_files, processes, syscalls
from crust.host.process.processes import Process

LIMIT_BYTES = 16 * 1024
SCHEMA = 1
_ERROR_MAX = 2000
ORPHANED = "[SandboxOrphaned]"
"""So begins the error of a claim whose runtime has lost the sandbox, while its hypervisor runs."""
_ATTEMPTS = 8
_PRINTED = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Without a control character (H-24)."""


class State(enum.Enum):
    """The state of a claim, as its holder reports it."""

    CLAIMED = "claimed"
    """The claimant holds the device; the guest has not mounted it yet."""
    MOUNTED = "mounted"
    ERROR = "error"


class NotPublished(errors.NotFound):
    def __init__(self, target: volumes.TargetPath | str) -> None:
        super().__init__(
            f"no deferred volume is published at {target}",
            why="the handoff directory has no entry for it",
        )


class HeldBySandbox(errors.NotReady):
    """A live sandbox has the volume. `sandbox_id` is empty until the sandbox has written claim.json."""

    def __init__(
        self,
        target: volumes.TargetPath,
        sandbox_id: str,
        handler: str,
        pid: int = 0,
        unread: errors.CrustError | None = None,
        *,
        is_stopped: bool = False,
    ) -> None:
        named = f"sandbox {printable(sandbox_id)} of {printable(handler)} has it, for which process {pid} answers"
        unnamed = str(unread or "a sandbox is claiming it, or it is being unpublished")
        stop = (
            "stop that sandbox first; if its runtime does not know it any more, the virtual machine runs alone: "
            "`crust end-orphan` checks that, and ends it"
        )
        if is_stopped:
            named += ", and the sandbox's virtual machine is stopped"
            stop = "let the machine go on (SIGCONT): its runtime cannot end the sandbox before; or end the machine"
        super().__init__(
            f"the volume at {target} is in use",
            why=named if sandbox_id else unnamed,
            hint=stop if sandbox_id else "retry",
        )
        self.sandbox_id = sandbox_id
        self.handler = handler


class HypervisorLives(HeldBySandbox):
    def __init__(self, target: volumes.TargetPath, claim: "Claim", process: Process) -> None:
        errors.NotReady.__init__(
            self,
            f"the volume at {target} is in use",
            why=f"process {process.pid} of sandbox {claim.sandbox_id} of {claim.handler} runs; what held its claim "
            "has ended before it",
            hint="start the daemon of that runtime, which claims the volume again for the process; if the pod is "
            "deleted and the process stays, end the process",
        )
        self.sandbox_id, self.handler = claim.sandbox_id, claim.handler


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
    process: Process | None = None
    """The hypervisor's process; None if the runtime does not name it, or the sandbox has the volume no more."""

    @property
    def is_orphaned(self) -> bool:
        """Whether the runtime says that it cannot stop the sandbox any more, and the hypervisor still runs (H-24)."""
        return self.state is State.ERROR and self.error.startswith(ORPHANED)


class _ProcessModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="ignore", frozen=True)

    pid: Annotated[int, pydantic.Field(gt=0, lt=2**31)]
    started: Annotated[int, pydantic.Field(ge=0, lt=2**63)]


class _ClaimModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="ignore", frozen=True)

    schema_version: Annotated[Literal[1], pydantic.Field(alias="schema")]
    sandbox_id: Annotated[str, pydantic.Field(min_length=1, max_length=256, pattern=_PRINTED)]
    handler: Annotated[str, pydantic.Field(min_length=1, max_length=63, pattern=_PRINTED)]
    state: State
    error: Annotated[str, pydantic.Field(max_length=_ERROR_MAX)] = ""
    pid: Annotated[int, pydantic.Field(ge=0, lt=2**31)]
    claimed_at: pydantic.AwareDatetime
    request_id: Annotated[str, pydantic.Field(pattern=r"^[0-9A-Za-z-]{0,64}$")] = ""
    process: _ProcessModel | None = None


@dataclass(eq=False)
class ClaimLock(contextlib.AbstractContextManager["ClaimLock"]):
    """The held lock of one entry. A child may inherit `fd` by `pass_fds`; otherwise exec closes it."""

    fd: int
    paths: layout.EntryPaths
    _is_settled: bool = True

    @classmethod
    def acquire(cls, paths: layout.EntryPaths, target: volumes.TargetPath) -> Self:
        """Take the entry's lock, or raise without waiting.

        A claim.json that exists by then belongs to a dead claim, and is put aside: see `dead`, `check_ended` and
        `settle`. Raises `HeldBySandbox`, `NotPublished`, `UntrustedLock`, and `UntrustedDirectory`; then the
        entry is as it was.
        """
        for _ in range(_ATTEMPTS):
            # before the lock: behind a symbolic link, or in a root that others write to, it is another entry's
            is_there = all(map(layout.directory_exists, (paths.root, paths.directory)))
            fd = _open_lock(paths.claim_lock, os.O_RDWR) if is_there else None
            if fd is None:
                raise NotPublished(target)
            keep = False
            try:
                if not locks.try_lock(fd):
                    raise _held(paths, target)
                if _is_at(paths.claim_lock, fd):
                    # an earlier one stays if there is no claim.json: its claimant was killed before it was settled
                    _rename(paths.claim, paths.dead_claim)
                    keep = True
                    return cls(fd, paths, _is_settled=False)
            finally:
                if not keep:
                    os.close(fd)
        raise errors.OperationPending(
            f"the entry for {target} keeps changing",
            why=f"it was replaced {_ATTEMPTS} times while a claimant tried to lock it",
            hint="retry",
        )

    @classmethod
    def of_holder(cls, entries: Collection[layout.EntryPaths], pid: int) -> dict[str, Self]:
        """Copies of the locks of these entries that the process holds, by digest; one list of its descriptors.

        Setting a lock again succeeds through the description that has the lock, and fails through any other: so the
        copy proves who holds the lock, and nobody else can take it while the copy is open.
        """
        held = {paths.claim_lock: paths for paths in entries if is_held(paths)}
        found: dict[str, Self] = {}
        with (
            syscalls.translating(f"cannot look at the locks of process {pid}"),
            contextlib.closing(open_files.copies(pid, held)) as copies,
            contextlib.ExitStack() as undo,
        ):
            for path, copy in copies:
                lock = cls(copy, held[path])
                undo.callback(lock.close)
                is_writable = fcntl.fcntl(copy, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
                # somebody has the lock, so only that description can set it
                is_its = is_writable and locks.try_lock(copy) and _is_at(path, copy)
                if not is_its or found.setdefault(lock.paths.digest, lock) is not lock:
                    lock.close()
            undo.pop_all()
        return found

    def dead(self) -> Claim | None:
        """The dead claim that was put aside, also by an earlier claimant that was killed; None without one.

        Raises `UnreadableHandoffRecord`, and the errors of `durable.find`.
        """
        return None if self._is_settled else read_aside(self.paths)

    def check_ended(self, target: volumes.TargetPath, *, but: Process | None = None) -> bool:
        """Whether the process of the dead claim was seen to have ended; false if none is known.

        Raises `HypervisorLives` while it runs, and `NotSeen` if that is not seen.

        `but` is the claimant's own hypervisor: its runtime was killed while it claimed. Without a dead claim, or with
        one that names no process, nothing is known here. Raises as `dead`, too: a claim that cannot be read may be of
        a process that runs.
        """
        dead = self.dead()
        if dead is None or dead.process is None or dead.process == but:
            return False
        if processes.has_ended(dead.process):
            return True
        raise HypervisorLives(target, dead, dead.process)

    def settle(self) -> None:
        """Remove the dead claim. Only after its process was seen to have ended, and nothing else uses the device."""
        if not self._is_settled:
            durable.remove(self.paths.dead_claim, survives_power_cut=False)
            self._is_settled = True

    def forget(self) -> None:
        """The dead claim went with the entry."""
        self._is_settled = True

    def close(self) -> None:
        """Close this copy of the descriptor; the lock ends with the last copy. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def release(self) -> None:
        """Put a dead claim that is not settled back; unlock, for all copies of the descriptor; close. Idempotent.

        For a lock that no hypervisor has: if another thread is just starting a child, that child has a copy until it
        calls exec, so closing alone would not unlock.
        """
        if self.fd < 0:
            return
        # it frees the lock where the unlock fails, unless a child has a copy
        with contextlib.closing(self):
            try:
                if not self._is_settled:
                    self._is_settled = True
                    _rename(self.paths.dead_claim, self.paths.claim)
            finally:  # without the rename the next claimant, and readers, find it where it is
                locks.unlock(self.fd)

    def __exit__(self, *_: object) -> None:
        self.release()


def _rename(old: str, new: str) -> None:
    with syscalls.translating(f"cannot rename {old}"), contextlib.suppress(FileNotFoundError):
        os.rename(old, new)


def is_held(paths: layout.EntryPaths) -> bool:
    """Whether a sandbox (or an unpublish) holds the entry's lock; false without an entry. Takes no lock."""
    fd = _open_lock(paths.claim_lock, os.O_RDONLY)
    if fd is None:
        return False
    with syscalls.closing(fd):
        return locks.is_locked(fd)


def read(paths: layout.EntryPaths) -> Claim | None:
    """The entry's claim, live or dead; None if there is no claim.

    A dead claim that a killed claimant had put aside is the entry's. Raises `UnreadableHandoffRecord` for an invalid
    claim.json, and the errors of `durable.find`.
    """
    live = is_held(paths)
    claim = _parsed(paths.claim, live=live)
    if claim is None and live:
        return Claim("", "", State.CLAIMED, "", 0, None, live)
    return claim or read_aside(paths)


def read_aside(paths: layout.EntryPaths) -> Claim | None:
    """The dead claim that a claimant, or an unpublish, has put aside for now: for the runtime whose claim it was.

    Raises as `read`.
    """
    return _parsed(paths.dead_claim, live=False)


def _parsed(path: str, *, live: bool) -> Claim | None:
    data = durable.find(path, limit_bytes=LIMIT_BYTES)
    if data is None:
        return None
    try:
        model = _ClaimModel.model_validate_json(data)
    except pydantic.ValidationError as err:
        raise UnreadableHandoffRecord(path, reasons(err)) from err
    named = model.process
    plain = model.model_dump(exclude={"schema_version", "process"})
    plain["error"] = printable(model.error)
    process = Process(named.pid, named.started) if named else None
    return Claim(**plain, process=process, live=live)


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
        **({"process": asdict(claim.process)} if claim.process else {}),
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
    # only the holder's name is missing; the held lock is certain
    except errors.CrustError as error:
        return HeldBySandbox(target, "", "", unread=error)
    if claim is None:
        return HeldBySandbox(target, "", "")
    process = claim.process
    is_stopped = process is not None and processes.state(process) == answers.Present("T")
    return HeldBySandbox(target, claim.sandbox_id, claim.handler, claim.pid, is_stopped=is_stopped)


def _open_lock(path: str, access: int) -> int | None:
    """Open the lock file, never create it; None if there is none."""
    with syscalls.translating(f"cannot open {path}"):
        try:
            fd = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
    try:
        with syscalls.translating(f"cannot look at {path}"):
            status = os.fstat(fd)
        why = ""
        if not stat.S_ISREG(status.st_mode):
            why = "it is not a regular file"
        elif status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            why = "other users may write to it"
        elif status.st_nlink > 1:
            why = "it has a second hard link"
        if why:  # it is not the file that the proxy created
            what, hint = f"{path} is not used as a lock", "find out who replaced it"
            raise errors.Refused.named("UntrustedLock", what, why=why, hint=hint)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_at(path: str, fd: int) -> bool:
    """Whether the path still names the locked file."""
    with syscalls.translating(f"cannot look at {path}"):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        return os.path.samestat(status, os.fstat(fd))
