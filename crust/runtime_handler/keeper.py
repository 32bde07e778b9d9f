"""The keeper: holds the descriptors of a VM's claims for exactly as long as the VM's process lives.

It serves hypervisors that cannot inherit descriptors (specs/handoff.md, H-43 to H-46). It is a program of its own,
which imports only the standard library: it survives the runtime's daemon and is small.
`crust.runtime_handler.blocking.keepers` starts it and is its client, for `crust keeper` as well:

    python -IS keeper.py <listening socket> <pidfd of the VM>        both inherited

The requests of its clients are in docs/runtime-author.md: each request and each answer is a line of JSON.

A runtime's own file (Kata's entry) may name the device only under the claim: `put` renames the file `new` over
`over`, and the claim's release, the VM's end and the `withdraw` of the last user rename `back` over it, before a
descriptor is closed. Only the keeper does both, and it alone knows who needs the file, so the file names the device
while the claim lives and is needed, and never after.

Two processes hold the same descriptors (docs/decisions/0015): the keeper, and a standby that the keeper forks again
after each change. When one ends, the other goes on with a new one. If the keeper ends between the fork of a new
standby and the end of the old one, a byte in the `token` pipe decides which of the two replaces it. The keeper
answers a change when only the new standby remains. Both ignore SIGTERM, SIGINT and SIGHUP, meant for the daemon.
"""

import array
import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import sys

VERSION = 2
"""Of requests and answers. Version 1 has no `all`, and lines of 4 KiB; answers without a version are of version 1."""
_REQUEST_BYTES = 64 * 1024
_DESCRIPTORS = 253  # the kernel's limit of a message (unix(7), SCM_MAX_FD)
_AGAIN_MS = 1000
HIERARCHIES = ("", "/unified", "/systemd")
"""In which systemd knows the processes of a unit: of cgroup v2, and of both with v1."""
GROUP = "crust-keepers"


class _Promoted(Exception):  # it is no error
    """This process was the standby, and is the keeper now: return to the loop."""


class KeeperProcess:
    """The held descriptors, and the two processes that hold them."""

    def __init__(self, listener: socket.socket, vm: int) -> None:
        self._listener = listener
        listener.settimeout(0)
        self._vm = vm
        self._held: dict[str, list[int]] = {}
        self._put: dict[str, _Put] = {}
        """Files that were put, by their paths."""
        self._clients: dict[int, _Client] = {}
        self._standby_pid = 0
        self._standby = -1
        self._token = (-1, -1)

    def run(self) -> None:
        """Hold the descriptors until the VM has ended."""
        while True:
            # become the keeper: with a new token, which no earlier standby can take
            for end in (*self._token, self._standby):
                if end >= 0:
                    os.close(end)
            self._standby, self._standby_pid = -1, 0
            self._token = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            os.write(self._token[1], b"k")
            try:
                self._keep()
            except _Promoted:
                continue
            return

    def _keep(self) -> None:
        while True:
            if self._standby < 0:
                self._renew_standby()
            ready = _wait(self._vm, self._standby, self._listener.fileno(), *self._clients)
            if self._vm in ready:
                self._withdraw_at_last()
                return
            if self._standby in ready:
                self._end_standby()
                continue
            if self._listener.fileno() in ready:
                self._accept()
            for fd in ready & self._clients.keys():
                self._serve(self._clients[fd])

    def _renew_standby(self) -> None:
        """Fork a standby that holds this process's present descriptors, then kill the previous standby.

        If memory or a descriptor is missing, it forks again after a second. Until then it answers no client: the
        previous standby does not have the change.
        """
        while not self._fork_standby():
            if self._vm in _wait(self._vm, timeout_ms=_AGAIN_MS):
                self._withdraw_at_last()
                os._exit(0)

    def _fork_standby(self) -> bool:
        """Replace the standby by a new fork; whether it did: False if memory or a descriptor is missing."""
        try:
            keeper = os.pidfd_open(os.getpid())
        except OSError:
            return False
        try:
            pid = os.fork()
        except OSError:
            os.close(keeper)
            return False
        if pid == 0:
            self._stand_by(keeper)
        os.close(keeper)
        self._end_standby()
        self._standby, self._standby_pid = os.pidfd_open(pid), pid
        return True

    def _end_standby(self) -> None:
        if self._standby >= 0:
            signal.pidfd_send_signal(self._standby, signal.SIGKILL)
            os.waitpid(self._standby_pid, 0)
            os.close(self._standby)
            self._standby, self._standby_pid = -1, 0

    def _stand_by(self, keeper: int) -> None:
        """In the standby: wait until the keeper has ended, then replace it, unless another standby does.

        It waits without a limit: a standby that woke up before would become a second keeper.
        """
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        if self._vm in _wait(self._vm, keeper):
            self._withdraw_at_last()
            os._exit(0)
        os.close(keeper)
        try:
            os.read(self._token[0], 1)
        except OSError as err:
            if err.errno != errno.EAGAIN:
                raise
            os._exit(0)
        raise _Promoted

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as err:
            # Without a descriptor or memory the connection stays in the queue, and poll would answer at once again.
            if err.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                _wait(self._vm, self._standby, *self._clients, timeout_ms=_AGAIN_MS)
            return
        self._clients[client.fileno()] = _Client(client)

    def _serve(self, client: "_Client") -> None:
        try:
            if (request := client.receive()) is not None:
                answer = self._answer(*request)
                client.socket.sendall(json.dumps(answer).encode() + b"\n")
            return
        except OSError:  # the client has gone, or sends no line
            pass
        del self._clients[client.socket.fileno()]
        client.close()

    def _answer(self, data: bytes, fds: list[int]) -> dict[str, object]:
        """Make the changes of a line until one fails. The standby gets them together.

        Files are renamed after the standby knows them: if this process is killed before the answer, the standby
        withdraws them.
        """
        requests, new_files, error = _parsed(data, len(fds)), dict[str, str](), ""
        for request, count in requests:
            given, fds = fds[:count], fds[count:]
            if error := self._change(request, given, new_files):
                break
        for fd in fds:
            os.close(fd)
        if any(request.get("op") != "held" for request, _ in requests):
            self._renew_standby()
        for over in new_files.keys() & self._put.keys():
            try:
                os.rename(new_files[over], over)
            except OSError as err:
                error = f"{over}: {err.strerror}"
        if error:
            return {"error": error}
        return {
            "version": VERSION,
            "pids": [os.getpid(), self._standby_pid],
            "vm": pid_of(self._vm),
            "held": {name: len(held) for name, held in self._held.items()},
            "put": {
                over: {"name": put.name, "users": sorted(put.users)}
                for over, put in self._put.items()
            },
        }

    def _change(self, request: dict[str, str], fds: list[int], new_files: dict[str, str]) -> str:
        """Make a change, and note the file that is to be put; returns why it is not made."""
        operation, name = request.get("op", ""), request.get("name", "")
        over, user = request.get("over", ""), request.get("user", "")
        if operation == "hold":
            self._replace(name, fds)
            return ""
        for fd in fds:
            os.close(fd)
        if operation == "put":
            if name not in self._held:
                return f"{name!r} is not held"
            self._put.setdefault(over, _Put(name, request.get("back", ""))).users.add(user)
            new_files[over] = request.get("new", "")
            return ""
        if operation == "withdraw":
            users = self._put[over].users if over in self._put else set()
            users.discard(user)
            return self._withdraw_each([] if users else [over])
        if operation == "release":
            error = self._withdraw_each([o for o, put in self._put.items() if put.name == name])
            if not error:
                self._replace(name, [])
            return error
        return "" if operation == "held" else f"unknown request {operation!r}"

    def _replace(self, name: str, fds: list[int]) -> None:
        for fd in self._held.pop(name, []):
            os.close(fd)
        if fds:
            self._held[name] = fds

    def _withdraw_each(self, files: list[str]) -> str:
        """Withdraw them; returns an error: a claim stays as long as a file may name the device."""
        error = ""
        for over in files:
            if over not in self._put:
                continue
            try:
                # the other process has done it, or the directory has gone
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.rename(self._put[over].back, over)
                del self._put[over]
            except OSError as err:  # the file may name the device still
                error = f"{over}: {err.strerror}"
        return error

    def _withdraw_at_last(self) -> None:
        """Withdraw all files after the VM's end; until that is done the descriptors are held."""
        while self._withdraw_each(list(self._put)):
            _wait(timeout_ms=_AGAIN_MS)


class _Put:
    """A file that was put: the name of its claim, the file that replaces it at last, and those who need it."""

    def __init__(self, name: str, back: str) -> None:
        self.name, self.back = name, back
        self.users: set[str] = set()


class _Client:
    def __init__(self, client_socket: socket.socket) -> None:
        self.socket = client_socket
        self._data = b""
        self._fds: list[int] = []

    def receive(self) -> tuple[bytes, list[int]] | None:
        """Read once; return a complete line with its descriptors. OSError: nothing more can come."""
        fds = array.array("i")
        space = socket.CMSG_LEN(_DESCRIPTORS * fds.itemsize)
        data, ancillary, _, _ = self.socket.recvmsg(_REQUEST_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        self._fds += fds
        self._data += data
        if not data or len(self._data) > _REQUEST_BYTES or len(self._fds) > _DESCRIPTORS:
            raise OSError
        if not self._data.endswith(b"\n"):
            return None
        line, received, self._data, self._fds = self._data, self._fds, b"", []
        return line, received

    def close(self) -> None:
        """Close the connection, and the descriptors of an incomplete request."""
        self.socket.close()
        for fd in self._fds:
            os.close(fd)


def _parsed(data: bytes, descriptors: int) -> list[tuple[dict[str, str], int]]:
    """The requests of a line, each with the number of its descriptors; an unknown one if the line is invalid."""
    try:
        line = json.loads(data)
        each = line["requests"] if line.get("op") == "all" else [{**line, "fds": descriptors}]
        return [
            ({key: str(value) for key, value in request.items()}, int(request.get("fds", 0)))
            for request in each
        ]
    except (ValueError, AttributeError, LookupError, TypeError):
        return [({}, 0)]


def pid_of(pidfd: int) -> int:
    """The process of a pidfd; -1 if it has ended (proc_pid_fdinfo(5))."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("Pid:")), -1)


def _wait(*fds: int, timeout_ms: int | None = None) -> set[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(timeout_ms)}


def _leave_unit() -> None:
    """Leave the control group of the daemon's unit for one beside it: claims go on if all of the unit is killed."""
    for mount in HIERARCHIES:
        # without the right or the hierarchy it stays, and lives as the unit's KillMode says
        with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
            for path in {line.rstrip().split(":", 2)[2] for line in file}:
                if path.endswith(".service"):
                    group = f"/sys/fs/cgroup{mount}{os.path.dirname(path)}/{GROUP}"
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(group)
                    with open(f"{group}/cgroup.procs", "w", encoding="ascii") as processes:
                        processes.write("0")


def main() -> None:
    _leave_unit()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # The kernel must not choose the keeper when memory is short; without the right to say so it may.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("-1000")
    if os.fork():
        os._exit(0)  # the daemon waits for this process, and is not the parent of the keeper
    listener, vm = (int(argument) for argument in sys.argv[1:])
    KeeperProcess(socket.socket(fileno=listener), vm).run()


if __name__ == "__main__":
    main()
