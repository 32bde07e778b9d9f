"""Containers: PID 1 (init.py) starts them, and the agent sends their output to the host.

Output is sent on credit: the host grants a number of bytes, and a container that writes more blocks on its pipe. So
neither the guest nor the host keeps a buffer that a container could fill. When the host disconnects, all credit ends;
a new host lists the containers and attaches to them. The record of a container that has ended is kept, with its exit
code, until the host releases it.
"""

from __future__ import annotations

import binascii
import os
import select
import socket
import threading
import time

from . import protocol, spawner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from . import jail

    Emit = Callable[[dict[str, Any]], None]

_CHUNK = 32 * 1024
_MAX_CONTAINERS = 64
_MAX_CREDIT = 16 * 1024 * 1024
_PATH = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"


class Container:
    """One container: its pipes, its credit, and how it ended."""

    def __init__(self, name: str, command: list[str], volumes: list[str], emit: Emit) -> None:
        self.name = name
        self.command = command
        self.volumes = volumes
        self.pid = 0
        self._emit = emit
        self._changed = threading.Condition()
        self._credit = 0
        self._status: int | None = None
        self._open_streams = 2
        self._attached = False
        self.stdin: int | None = None
        self._stdin_lock = threading.Lock()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._status is None

    def attach(self, credit: int) -> None:
        """Send output to the host from now on, `credit` bytes at first; sends the exit again if it has ended."""
        with self._changed:
            self._attached = True
            self._credit = credit
            self._changed.notify_all()
            self._tell_end()

    def detach(self) -> None:
        """Send nothing more: the host has disconnected."""
        with self._changed:
            self._attached = False
            self._credit = 0

    def add_credit(self, amount: int) -> None:
        """The host accepts `amount` more bytes."""
        with self._changed:
            self._credit = min(self._credit + amount, _MAX_CREDIT)
            self._changed.notify_all()

    def ended(self, status: int) -> None:
        """PID 1 reaped it."""
        with self._changed:
            self._status = status
            self._changed.notify_all()
            self._tell_end()

    def wait(self, timeout_s: float) -> None:
        """Wait until PID 1 has reaped it, for `timeout_s` at most: a container may wait for a disk for ever."""
        with self._changed:
            self._changed.wait_for(lambda: self._status is not None, timeout_s)

    def pump(self, stream: str, source: int) -> None:
        """Send one stream until its end; runs in a thread of its own."""
        ready = select.poll()
        ready.register(source, select.POLLIN)
        while data := self._read(source, ready):
            encoded = binascii.b2a_base64(data, newline=False).decode()
            self._emit(
                {"event": "output", "container": self.name, "stream": stream, "data": encoded}
            )
        os.close(source)
        with self._changed:
            self._open_streams -= 1
            self._tell_end()

    def write(self, data: bytes) -> None:
        """Write to its standard input; blocks while it does not read. Faults: conflict once it is closed."""
        with self._stdin_lock:
            if self.stdin is None:
                raise protocol.Fault("conflict", f"standard input of {self.name} is closed")
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(self.stdin, view) :]
            except BrokenPipeError as err:
                raise protocol.Fault("conflict", f"{self.name} does not read its input") from err

    def close_input(self) -> None:
        """Close its standard input."""
        with self._stdin_lock:
            if self.stdin is not None:
                os.close(self.stdin)
                self.stdin = None

    def _read(self, source: int, ready: select.poll) -> bytes:
        """Read as many bytes as credit allows; no bytes at the end.

        It waits for credit only when there is something to read: both streams share one credit, and a silent stream
        that reserved a part would starve the other.
        """
        ready.poll()
        with self._changed:
            self._changed.wait_for(lambda: self._credit > 0)
            data = os.read(source, min(self._credit, _CHUNK))
            self._credit -= len(data)
        return data

    def _tell_end(self) -> None:
        """Send the exit once the container has ended and all output is sent. The caller holds the lock."""
        if self._status is None or self._open_streams or not self._attached:
            return
        code = os.waitstatus_to_exitcode(self._status)
        ending = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": -code}
        self._emit({"event": "exit", "container": self.name, **ending})


class Containers:
    """All containers of this VM."""

    def __init__(self, line: socket.socket, emit: Emit) -> None:
        self._emit = emit
        self._lock = threading.Lock()
        self._by_name: dict[str, Container] = {}
        self._early: dict[int, int] = {}
        self._spawner = spawner.Spawner(line, self._on_exit)

    def start(self, args: protocol.Args) -> dict[str, Any]:
        """Start a container under a name of the host's choice. Faults: conflict, exhausted, and the start's own."""
        name, credit = args.name("container"), _credit(args)
        with_input = args.flag("stdin", default=False)
        spec = _spec(args)
        args.end()
        names = [m["volume"] for m in spec["mounts"]]
        container = Container(name, spec["command"], names, self._emit)
        self._register(container)
        try:
            self._launch(container, spec, with_input=with_input, credit=credit)
        except BaseException:
            with self._lock:
                del self._by_name[name]
            raise
        return {"pid": container.pid}

    def stdin(self, args: protocol.Args) -> dict[str, Any]:
        """Write to a container's standard input; `eof` closes it."""
        container = self._find(args)
        data = binascii.a2b_base64(args.text("data", "", limit=200_000), strict_mode=True)
        eof = args.flag("eof", default=False)
        args.end()
        if data:
            container.write(data)
        if eof:
            container.close_input()
        return {}

    def credit(self, args: protocol.Args) -> dict[str, Any]:
        """The host accepts `credit` more bytes of output."""
        container = self._find(args)
        amount = _credit(args)
        args.end()
        container.add_credit(amount)
        return {}

    def attach(self, args: protocol.Args) -> dict[str, Any]:
        """Send a container's output and exit from now on."""
        container = self._find(args)
        amount = _credit(args)
        args.end()
        container.attach(amount)
        return {}

    def kill(self, args: protocol.Args) -> dict[str, Any]:
        """Send a signal to a container; an ended container is success."""
        container = self._find(args)
        number = args.integer("signal", 1, 64)
        args.end()
        if container.running:
            self._spawner.kill(container.pid, number)
        return {}

    def release(self, args: protocol.Args) -> dict[str, Any]:
        """Remove the record of a container that has ended. Faults: busy while it runs."""
        container = self._find(args)
        args.end()
        if container.running:
            raise protocol.Fault("busy", f"container {container.name} runs", "kill it first")
        container.close_input()
        with self._lock:
            self._by_name.pop(container.name, None)
        return {}

    def listing(self) -> dict[str, Any]:
        """All containers that are not released yet."""
        with self._lock:
            known = list(self._by_name.values())
        rows = [
            {
                "container": c.name,
                "running": c.running,
                "volumes": c.volumes,
                "command": c.command[0],
            }
            for c in known
        ]
        return {"containers": rows}

    def check_unused(self, volume: str) -> None:
        """Faults: busy, naming the running containers that have this volume."""
        with self._lock:
            users = [c.name for c in self._by_name.values() if c.running and volume in c.volumes]
        if users:
            raise protocol.Fault(
                "busy",
                f"volume {volume} is in use by container {', '.join(users)}",
                "stop the containers that use it first",
            )

    def detach_all(self) -> None:
        """Send no container's output any more: the host has disconnected."""
        with self._lock:
            for container in self._by_name.values():
                container.detach()

    def stop_all(self, timeout_s: float) -> None:
        """Kill all running containers and wait until they have ended, which releases their volumes."""
        with self._lock:
            running = [c for c in self._by_name.values() if c.running and c.pid]
        self._spawner.kill(0, 9)
        ends_s = time.monotonic() + timeout_s
        for container in running:
            container.wait(max(0.0, ends_s - time.monotonic()))

    def _register(self, container: Container) -> None:
        with self._lock:
            if container.name in self._by_name:
                raise protocol.Fault("conflict", f"there is a container {container.name} already")
            if len(self._by_name) >= _MAX_CONTAINERS:
                raise protocol.Fault(
                    "exhausted", f"{_MAX_CONTAINERS} containers exist", "release some"
                )
            self._by_name[container.name] = container

    def _launch(
        self, container: Container, spec: jail.Spec, *, with_input: bool, credit: int
    ) -> None:
        input_read, input_write = os.pipe2(os.O_CLOEXEC)
        output, error = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        theirs = [input_read, output[1], error[1]]
        try:
            pid = self._spawner.spawn(spec, theirs)
        except BaseException:
            for fd in (input_write, output[0], error[0]):
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        container.stdin = input_write
        if not with_input:
            container.close_input()
        for stream, source in (("stdout", output[0]), ("stderr", error[0])):
            threading.Thread(target=container.pump, args=(stream, source), daemon=True).start()
        container.attach(credit)
        self._began(container, pid)

    def _began(self, container: Container, pid: int) -> None:
        with self._lock:
            container.pid = pid
            status = self._early.pop(pid, None)
        if status is not None:
            container.ended(status)

    def _on_exit(self, pid: int, status: int) -> None:
        with self._lock:
            container = next((c for c in self._by_name.values() if c.pid == pid), None)
            if container is None:
                # It ended before its start was answered, or its start failed.
                self._early[pid] = status
                while len(self._early) > _MAX_CONTAINERS:
                    self._early.pop(next(iter(self._early)))
                return
        container.ended(status)

    def _find(self, args: protocol.Args) -> Container:
        name = args.name("container")
        with self._lock:
            container = self._by_name.get(name)
        if container is None:
            raise protocol.Fault("not_found", f"there is no container {name}")
        return container


def _credit(args: protocol.Args) -> int:
    return args.integer("credit", 0, _MAX_CREDIT)


def _spec(args: protocol.Args) -> jail.Spec:
    command = args.texts("command")
    environment = [_PATH, "HOME=/root", *args.texts("environment")]
    directory = args.text("directory", "/")
    if not command or not command[0]:
        raise protocol.Fault("bad_request", "command is empty")
    if any("=" not in item for item in environment):
        raise protocol.Fault("bad_request", "environment has an item without `=`")
    return {
        "command": command,
        "environment": environment,
        "directory": _absolute(directory),
        "uid": args.integer("uid", 0, 2**32 - 2, 0),
        "gid": args.integer("gid", 0, 2**32 - 2, 0),
        "groups": args.integers("groups"),
        "mounts": [_mount(item) for item in args.objects("mounts")],
    }


def _mount(item: protocol.Args) -> jail.Mount:
    mount: jail.Mount = {
        "volume": item.name("volume"),
        "sub_path": item.text("sub_path", ""),
        "destination": _absolute(item.text("destination")),
        "read_only": item.flag("read_only", default=False),
    }
    item.end()
    if mount["destination"] == "/":
        raise protocol.Fault("bad_request", "a volume cannot be the root of a container")
    return mount


def _absolute(path: str) -> str:
    if not path.startswith("/") or ".." in path.split("/"):
        raise protocol.Fault("bad_request", f"{path!r} is not an absolute path without `..`")
    return path
