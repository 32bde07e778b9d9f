"""PID 1: prepares the guest, keeps an agent running, starts containers for it and reaps them.

Containers are forked here and not in the agent because this process has one thread: the fork of a threaded process
may inherit a lock that is never released. The agent sends requests over a seqpacket socket:

    {"id": n, "spec": {...}} + stdin, stdout, stderr      -> {"id": n, "pid": p} or {"id": n, "error": [...]}
    {"kill": pid, "signal": s}                            pid 0 means all, also those of an earlier agent
    (an exit)                                             -> {"pid": p, "status": wait status}; none after an error

An agent that dies is started again; containers and mounts outlive it. After RESTARTS starts the guest powers off: the
host then handles it as a VM that has ended.
"""

from __future__ import annotations

import array
import json
import os
import resource
import select
import signal
import socket

from . import jail, linux, mounts, protocol
from . import main as agent_main

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RESTARTS = 5
_MAX_MESSAGE = 512 * 1024
_SO_SNDBUFFORCE = 32  # asm-generic/socket.h; the socket module has no name for it


def main() -> None:
    """Run as PID 1; never returns."""
    prepare()
    Init().run()


def prepare() -> None:
    """Mount the usual filesystems, and load the modules through which the host reaches the agent."""
    for fstype, target in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")):
        linux.mount(fstype, target, fstype)
    for target in ("/run", "/tmp"):
        linux.mount("tmpfs", target, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755")
    for directory in ("/run/state", "/run/volumes"):
        os.mkdir(directory, 0o700)
    # A separate mount, so that a container's namespace can detach all volumes at once by unmounting it.
    linux.mount("tmpfs", "/run/volumes", "tmpfs", 0, "mode=700")
    resource.setrlimit(resource.RLIMIT_NOFILE, (65536, 65536))
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    mounts.load_boot_modules()


class Init:
    """The loop of PID 1."""

    def __init__(self) -> None:
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._host_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._containers: set[int] = set()
        self._starting: dict[int, tuple[int, int]] = {}
        self._failed: dict[int, dict[str, Any]] = {}
        """The answers of starts that failed, by pid. Each waits for the end, until which the mounts stay busy."""
        self._agent = 0
        self._socket: socket.socket | None = None
        self._restarts_left = RESTARTS

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            line = self._socket or self._start_agent()
            ready, _, _ = select.select([line.fileno(), self._wake_read, *self._starting], [], [])
            for source in ready:
                if source in self._starting:
                    self._started(source)
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._reap()
            if line.fileno() in ready:
                self._serve(line)

    def _start_agent(self) -> socket.socket:
        if self._restarts_left == 0:
            print("crust: the agent keeps failing", flush=True)  # noqa: T201
            linux.power_off()
        self._restarts_left -= 1
        self._failed.clear()
        kind = socket.SOCK_SEQPACKET
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _MAX_MESSAGE)
        self._agent = os.fork()
        if self._agent == 0:
            ours.close()
            agent_main.run(theirs)
        theirs.close()
        self._socket = ours
        return ours

    def _serve(self, line: socket.socket) -> None:
        try:
            data, fds = _receive(line)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            # The agent is exiting; its exit arrives as SIGCHLD.
            line.close()
            self._socket = None
            return
        message = json.loads(data)
        if "kill" in message:
            for pid in (
                self._containers & {message["kill"]} if message["kill"] else self._containers
            ):
                os.kill(pid, message["signal"])
            return
        self._spawn(message["id"], message["spec"], fds)
        for fd in fds:
            os.close(fd)

    def _spawn(self, request: int, spec: jail.Spec, fds: list[int]) -> None:
        report_read, report_write = os.pipe2(os.O_CLOEXEC)
        # The child becomes PID 1 of the new namespace; this process must come back out of it, or the next
        # container could not get one of its own (pid_namespaces(7)).
        linux.unshare(linux.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                linux.set_namespace(self._host_pids, linux.CLONE_NEWPID)
        if pid == 0:
            _become(spec, fds, report_write)
        os.close(report_write)
        self._containers.add(pid)
        self._starting[report_read] = (request, pid)

    def _started(self, report: int) -> None:
        request, pid = self._starting.pop(report)
        error = os.read(report, 65536)
        os.close(report)
        if error:
            self._failed[pid] = {"id": request, "error": json.loads(error)}
        else:
            self._send({"id": request, "pid": pid})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._containers:
                self._containers.discard(pid)
                self._send(self._failed.pop(pid, {"pid": pid, "status": status}))

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send(json.dumps(message).encode())
        except OSError:
            # The agent died; the next one waits only for containers that it starts itself.
            self._socket.close()
            self._socket = None


def _receive(source: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    data, ancillary, _, _ = source.recvmsg(_MAX_MESSAGE, socket.CMSG_LEN(3 * fds.itemsize))
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def _become(spec: jail.Spec, fds: list[int], report: int) -> None:
    """In the child: become the container, or report the error."""
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        jail.enter(spec)
        environment = dict(item.split("=", 1) for item in spec["environment"])
        os.execvpe(spec["command"][0], spec["command"], environment)
    except protocol.Fault as err:
        _write(report, [err.code, err.message, err.hint])
    except OSError as err:
        fault = protocol.fault_of(err, f"starting {spec['command'][0]}")
        _write(report, [fault.code, fault.message, fault.hint])
    except BaseException as err:
        _write(report, ["internal", f"{type(err).__name__}: {err}", ""])
    finally:
        os._exit(127)


def _write(report: int, error: list[str]) -> None:
    os.write(report, json.dumps([text[:4096] for text in error]).encode())
