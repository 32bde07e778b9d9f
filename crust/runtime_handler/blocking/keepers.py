"""Starts the keeper of a VM, and calls it (keeper.py). `crust keeper` is this module for runtimes in other languages.

    keeper = keepers.start(socket_path, process)    once the VM's process runs
    keeper.hold(name, claim.fds)                    from now on the claim lives as long as the VM
    keeper.put(name, over, new=…, back=…, user=…)   put a file of the runtime's own, at most while the claim lives
    with keeper.together(): …                       the changes of the block by one request
    claim.hand_over(*keeper.pids)
    keepers.connect(socket_path)                    in a restarted daemon; `adopt_volume` with `keeper.pid`

All methods block, for milliseconds. A call raises `KeeperGone` when the process at the other end has ended, and
`connect` when its standby has too: the kernel refuses the connection (ECONNREFUSED), or there is no socket (ENOENT).
If both were killed while the VM lives, the claims are free: `kept_vm` claims them again at once (H-46). A keeper that
is stopped, or slow, still holds, also when its queue of connections is full: `KeeperNotResponding`. Every other errno
says nothing about the keeper: `NotSeen`.
"""

import array
import contextlib
import errno
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from crust.core import errors
from crust.host import answers
from crust.host.process import processes, syscalls
from crust.host.process.processes import Process
from crust.runtime_handler import keeper as keeper_program

__all__ = [
    "Keeper",
    "KeeperGone",
    "KeeperNotResponding",
    "PutFile",
    "connect",
    "process_of_pidfd",
    "start",
]

_ANSWER_S = 10.0
_READ_BYTES = 64 * 1024
_ANSWER_MAX_BYTES = 1 << 20
"""A line has a name and a path for each volume of a machine; what never ends is no keeper's."""
_SUCCESSIONS = 16
"""After so many connections that break, the caller must try again later."""


class KeeperGone(errors.PeerUnavailable):
    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"no keeper answers at {path}", why=why)


class KeeperNotResponding(errors.PeerUnavailable):
    def __init__(
        self, path: Path, why: str = f"nothing came within {_ANSWER_S:.0f} s, and it has not ended"
    ) -> None:
        super().__init__(f"the keeper at {path} does not answer", why=why)


@dataclass(frozen=True, slots=True)
class PutFile:
    """A file that a keeper has put: the name of its claim, and those who need it."""

    name: str
    users: frozenset[str]


@dataclass(eq=False)
class Keeper:
    """A connection to the keeper of one VM. Closing it releases nothing."""

    path: Path
    _line: socket.socket
    pids: tuple[int, ...] = ()
    """The keeper and its standby, as of the last answer."""
    vm_pid: int = -1
    """The VM's process, as of the last answer; -1: it has ended."""
    put_files: dict[str, PutFile] = field(default_factory=dict)
    """The files that were put and not withdrawn, by their paths, as of the last answer."""
    counts: dict[str, int] = field(default_factory=dict)
    """The number of descriptors that the keeper holds, by name, as of the last answer."""
    _version: int = 0
    _collected: list[tuple[dict[str, str], Sequence[int]]] | None = None

    def fileno(self) -> int:
        """The connection; if it is readable outside of a call, the process at the other end has ended."""
        return self._line.fileno()

    @property
    def pid(self) -> int:
        """The process that holds the descriptors."""
        return self.pids[0]

    def hold(self, name: str, fds: Sequence[int]) -> None:
        """Give copies of `fds` to the keeper, in place of its descriptors under `name`. Raises KeeperGone.

        After an error the keeper may hold them: keep the claim, connect, and hold again.
        """
        self._change({"op": "hold", "name": name}, fds)

    def release(self, name: str) -> None:
        """Close the keeper's descriptors under `name`; absent is success. Raises KeeperGone."""
        self._change({"op": "release", "name": name})

    def put(self, name: str, over: str, *, new: str, back: str, user: str = "") -> None:
        """Rename `new` over `over` now, and `back` over it when the claim `name` ends. Raises KeeperGone.

        `user` needs the file until it withdraws it, beside others that have put it for the same claim.

        All three are files of one filesystem; the caller removes `back` if the keeper did not need it. After an error
        the keeper may have renamed `new`: connect, and withdraw the file or put it again.
        """
        request = {"op": "put", "name": name, "over": over, "new": new, "back": back, "user": user}
        self._change(request)

    def withdraw(self, over: str, user: str = "") -> None:
        """Rename the file's `back` over it, unless another user needs it; absent is success. Raises KeeperGone."""
        self._change({"op": "withdraw", "over": over, "user": user})

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Ask for the changes of the block at its end, at once: a keeper takes milliseconds for each request.

        It makes them in their order; the first that fails ends them. A keeper of version 1 gets one after the other.
        """
        collected: list[tuple[dict[str, str], Sequence[int]]] = []
        self._collected = collected
        try:
            yield
        finally:
            self._collected = None
        if self._version < keeper_program.VERSION:
            for request, fds in collected:
                self._ask(request, fds)
        elif collected:
            requests = [{**request, "fds": len(fds)} for request, fds in collected]
            every_fd = [fd for _, fds in collected for fd in fds]
            self._ask({"op": "all", "requests": requests}, every_fd)

    def held(self) -> dict[str, int]:
        """The `counts` now. Raises KeeperGone."""
        self._ask({"op": "held"})
        return self.counts

    def close(self) -> None:
        """End the connection; idempotent."""
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _change(self, request: dict[str, str], fds: Sequence[int] = ()) -> None:
        if self._collected is None:
            self._ask(request, fds)
        else:
            self._collected.append((request, fds))

    def _ask(self, request: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._line.sendmsg([json.dumps(request).encode() + b"\n"], rights)
            data = b""
            while not data.endswith(b"\n") and len(data) <= _ANSWER_MAX_BYTES:
                if not (more := self._line.recv(_READ_BYTES)):
                    raise KeeperGone(self.path, "it closed the connection")
                data += more
        except TimeoutError as err:
            raise KeeperNotResponding(self.path) from err
        except OSError as err:
            raise _of_errno(err, self.path, _BROKEN) from err
        why = "its answer is not a keeper's"
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            answer = json.loads(data)
            version = answer.get("version", 1)
            if version not in range(1, keeper_program.VERSION + 1):
                why = f"its answers have version {version!r:.20}, which this process cannot read"
            elif "error" in answer:
                why = str(answer["error"])
            else:
                self.pids, self._version = tuple(answer["pids"]), version
                self.vm_pid = answer["vm"]
                self.put_files = {
                    over: PutFile(put["name"], frozenset(put["users"]))
                    for over, put in answer["put"].items()
                }
                self.counts = answer["held"]
                return
        raise errors.RuntimeFailed.named(
            "KeeperRefused", f"the keeper at {self.path} refused a request", why=why
        )


def start(path: Path, process: Process) -> Keeper:
    """The keeper of the VM of `process`, which listens at `path`: the running keeper, or a new one.

    Only the caller may write to the directory of `path`. Raises `errors.NotFound` if the VM has ended, KeeperRuns if
    the keeper there serves another VM, KeeperPathTaken if another file is there, KeeperGone if the keeper does not
    start, KeeperNotResponding, KeeperRefused, `NotSeen`, and the errors of `path`.
    """
    with processes.holding(process) as vm:
        if vm is None:
            raise errors.NotFound(
                f"no keeper is started for process {process.pid}", why="the process has ended"
            )
        with contextlib.suppress(KeeperGone):
            if (running := _serving(path)) is not None:
                if running.vm_pid == process.pid:
                    return running
                # only the end of its own VM may release its claims
                running.close()
                raise errors.Conflict.named(
                    "KeeperRuns",
                    f"no keeper of process {process.pid} is started at {running.path}",
                    why=f"process {running.pid} is the keeper there, of process {running.vm_pid}",
                )
        null = subprocess.DEVNULL
        with (
            syscalls.translating(f"cannot start the keeper of process {process.pid}"),
            _listening(path) as listener,
        ):
            fds = (listener.fileno(), vm)
            # in a session of its own: a signal to the daemon's process group must not reach it
            subprocess.run(
                [sys.executable, "-IS", keeper_program.__file__, *map(str, fds)],
                stdin=null, stdout=null, stderr=null, pass_fds=fds, cwd="/",
                start_new_session=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, check=False,
            )  # fmt: skip
        return connect(path)


def _listening(path: Path) -> socket.socket:
    """A socket that listens at `path`, in place of a dead one."""
    with syscalls.translating(f"a keeper cannot listen at {path}"):
        _remove_left(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            os.chmod(path, 0o600)
            listener.listen(8)
        except BaseException:
            listener.close()
            raise
        return listener


def _remove_left(path: Path) -> None:
    """Remove the socket of keepers that have ended, but neither another file nor another program's socket."""
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        why = "it is no socket"
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            why = "another program listens there"
            probe.settimeout(_ANSWER_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                os.unlink(path)
                return
        raise errors.Conflict.named("KeeperPathTaken", f"no keeper is started at {path}", why=why)


def process_of_pidfd(pidfd: int) -> Process:
    """The process of a pidfd.

    Raises `errors.NotFound` if it has ended, or the descriptor is no pidfd, and `NotSeen`.
    """
    with syscalls.translating(f"cannot look at descriptor {pidfd}"):
        pid = keeper_program.pid_of(pidfd)
        process = answers.seen(processes.of(pid)) if pid > 0 else None
        if process is None or keeper_program.pid_of(pidfd) != pid:
            raise errors.NotFound(f"descriptor {pidfd} is not a pidfd of a process that runs")
    return process


def connect(path: Path) -> Keeper:
    """Connect to the keeper at `path`, or to the standby that succeeds it.

    Both have the listening socket: a connection is refused when both have ended, and breaks when one has. Raises
    KeeperGone, KeeperNotResponding, and `NotSeen`.
    """
    keeper = _serving(path)
    if keeper is None:
        raise KeeperNotResponding(path, f"{_SUCCESSIONS} connections were accepted and ended")
    return keeper


def _serving(path: Path) -> Keeper | None:
    """The keeper; None if a process accepts each connection and ends it: another program, or keepers are killed."""
    for _ in range(_SUCCESSIONS):
        try:
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as err:
            raise _of_errno(err, path, ()) from err
        try:
            line.settimeout(_ANSWER_S)
            line.connect(str(path))
        except OSError as err:
            line.close()
            raise _of_errno(err, path, _REFUSED) from err
        keeper = Keeper(path, line)
        try:
            keeper.held()
        except KeeperGone:
            line.close()  # that process has ended; its standby may serve the next connection
        except BaseException:
            line.close()
            raise
        else:
            return keeper
    return None


_BROKEN = (errno.EPIPE, errno.ECONNRESET)
_REFUSED = (errno.ECONNREFUSED, errno.ENOENT)


def _of_errno(err: OSError, path: Path, gone: Collection[int]) -> errors.CrustError:
    """`KeeperGone` for the errnos that say so; EAGAIN is a full queue; any other says nothing about the keeper."""
    if err.errno in gone:
        return KeeperGone(path, syscalls.reason(err))
    if isinstance(err, TimeoutError | BlockingIOError):
        return KeeperNotResponding(path)
    return answers.NotSeen(f"cannot see whether a keeper serves {path}", why=syscalls.reason(err))
