"""The agent: reads requests from the port and serves each in a thread of its own.

A slow request (a freeze under load, a disk that hangs) delays no other: requests.py says which may begin. Every
failure of a request is answered as a typed error, also an unknown exception, and the agent continues with the next
line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import threading
import traceback

from . import containers, devices, linux, mounts, protocol, requests, volumes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    Operation = Callable[[protocol.Args], dict[str, Any]]

_REQUEST_ID = re.compile(r"[0-9A-Za-z-]{0,64}\Z")
PORT_NAME = "crust.agent"
_PORTS = "/sys/class/virtio-ports"
# Together less than the 60 s that the host waits for a shutdown.
_THAW_S = 5.0
_STOP_S = 10.0
_UNMOUNT_S = 35.0


def run(line: socket.socket) -> NoReturn:
    """Serve until the process dies; called by PID 1 in a fresh child."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Blocked in every thread, because `_wait_for_host` waits for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
        Agent(_open_port(), line).serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class Agent:
    """The operations, and the port on which the host requests them."""

    def __init__(self, port: int, line: socket.socket) -> None:
        self._port = port
        self._write_lock = threading.Lock()
        self._requests = requests.Requests()
        self._volumes = volumes.Volumes()
        self._containers = containers.Containers(line, self._send)
        self._operations: dict[str, Operation] = {
            "hello": self._hello,
            "ping": self._ping,
            "mount": self._volumes.mount,
            "unmount": self._unmount,
            "own": self._volumes.own,
            "usage": self._volumes.usage,
            "grow": self._volumes.grow,
            "freeze": self._volumes.freeze,
            "thaw": self._volumes.thaw,
            "health": self._volumes.health,
            "container.start": self._containers.start,
            "container.stdin": self._containers.stdin,
            "container.attach": self._containers.attach,
            "container.kill": self._containers.kill,
            "container.release": self._containers.release,
            "container.list": self._list,
            "shutdown": self._shutdown,
        }

    def serve(self) -> None:
        """Read requests until the process ends."""
        lines = protocol.Lines()
        while True:
            data = os.read(self._port, 65536)
            if not data:
                lines.reset()
                self._containers.detach_all()
                self._wait_for_host()
            for line in lines.feed(data):
                self._take(line)

    def _take(self, line: bytes | None) -> None:
        try:
            request, operation, args, request_id = _parse(line)
        except protocol.Fault as fault:
            self._send(_failure(None, fault))
            return
        if operation == "container.credit":
            # Sent with every few lines of output and never answered; a container that has ended needs no credit.
            with contextlib.suppress(protocol.Fault):
                self._containers.credit(protocol.Args(args))
        elif operation in ("hello", "ping"):
            # Answered in order: the host drops everything before the answer to hello. Neither can hang.
            self._send({"id": request, **self._outcome(operation, args)})
        else:
            if request_id and operation in requests.CHANGES:
                _say(f"{operation} {requests.subject(args)} request_id={request_id}")
            self._begin(request, operation, args)

    def _begin(self, request: str, operation: str, args: object) -> None:
        try:
            run = self._requests.begin(request, operation, args)
        except protocol.Fault as fault:
            self._send(_failure(request, fault))
            return
        if run is not None:
            threading.Thread(target=self._in_thread, args=(run,), daemon=True).start()

    def _in_thread(self, run: requests.Run) -> None:
        outcome = self._outcome(run.operation, run.args)
        for request in self._requests.end(run):
            self._send({"id": request, **outcome})
        if run.operation == "shutdown" and "ok" in outcome:
            linux.power_off()

    def _outcome(self, operation: str, args: object) -> dict[str, Any]:
        try:
            return {"ok": self._call(operation, args)}
        except protocol.Fault as fault:
            return {"error": _error(fault)}
        except OSError as err:
            return {"error": _error(protocol.fault_of(err, operation))}
        except Exception as err:  # a bug: the agent must go on serving the sandbox's other volumes
            traceback.print_exc()
            failure = f"{operation}: {type(err).__name__}: {err}"
            return {"error": _error(protocol.Fault("internal", failure[:500]))}

    def _call(self, operation: str, args: object) -> dict[str, Any]:
        if operation not in self._operations:
            raise protocol.Fault("unsupported", f"there is no operation {operation!r}")
        return self._operations[operation](protocol.Args(args))

    def _send(self, message: dict[str, Any]) -> None:
        data = memoryview(protocol.encode(message))
        with self._write_lock:
            while data:
                data = data[os.write(self._port, data) :]

    def _hello(self, args: protocol.Args) -> dict[str, Any]:
        """A new host has connected; the credit of the earlier one ends."""
        args.end()
        self._containers.detach_all()
        return {
            "protocol": protocol.VERSION,
            "kernel": os.uname().release,
            "agent": str(os.getpid()),
            "filesystems": mounts.known_filesystems(),
            "volumes": self._volumes.names(),
        }

    def _ping(self, args: protocol.Args) -> dict[str, Any]:
        """Touches no filesystem, so that a hanging filesystem does not make the agent look dead."""
        args.end()
        return {}

    def _unmount(self, args: protocol.Args) -> dict[str, Any]:
        self._containers.check_unused(args.name("volume"))
        return self._volumes.unmount(args)

    def _list(self, args: protocol.Args) -> dict[str, Any]:
        args.end()
        return self._containers.listing()

    def _shutdown(self, args: protocol.Args) -> dict[str, Any]:
        """Stop all containers, unmount all volumes; the guest powers off once the answer is sent.

        A volume that hangs is given up after a while, so that the others are unmounted within the host's timeout.
        """
        args.end()
        self._volumes.thaw_all(_THAW_S)
        self._containers.stop_all(_STOP_S)
        return {"stuck": self._volumes.unmount_all(_UNMOUNT_S)}

    def _wait_for_host(self) -> None:
        """The port reads end of file while no host is connected; the driver sends SIGIO when one connects.

        The time limit covers a signal that arrived before this wait began.
        """
        signal.sigtimedwait([signal.SIGIO], 0.5)


def _open_port() -> int:
    """Open the host's port, which appears some time after its driver is loaded; SIGIO reports a new host."""
    name = devices.wait_until(_find_port, 60)
    if name is None:
        raise protocol.Fault("not_found", f"there is no port {PORT_NAME}")
    port = os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC)
    fcntl.fcntl(port, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(port, fcntl.F_SETFL, fcntl.fcntl(port, fcntl.F_GETFL) | os.O_ASYNC)
    return port


def _find_port() -> str | None:
    for name in os.listdir(_PORTS):
        with open(f"{_PORTS}/{name}/name", encoding="utf-8") as source:
            if source.read().strip() == PORT_NAME:
                return name
    return None


def _parse(line: bytes | None) -> tuple[str, str, object, str]:
    if line is None:
        raise protocol.Fault("bad_request", f"a line is longer than {protocol.MAX_LINE} bytes")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise protocol.Fault("bad_request", "a line is not JSON") from err
    if not isinstance(message, dict):
        raise protocol.Fault("bad_request", "a line is not an object")
    request, operation = message.get("id"), message.get("op")
    if not isinstance(request, str) or len(request) > 64 or not isinstance(operation, str):
        raise protocol.Fault("bad_request", "a request has no id or no op")
    request_id = message.get("request_id", "")
    if not isinstance(request_id, str) or not _REQUEST_ID.match(request_id):
        raise protocol.Fault("bad_request", "request_id is not one of crust")
    return request, operation, message.get("args", {}), request_id


def _say(text: str) -> None:
    """Print a line on the guest's console, which the host keeps: a request, and its call of the host."""
    print(f"crust: {text}", flush=True)  # noqa: T201


def _failure(request: str | None, fault: protocol.Fault) -> dict[str, Any]:
    return {"id": request, "error": _error(fault)}


def _error(fault: protocol.Fault) -> dict[str, str]:
    return {"code": fault.code, "message": fault.message, "hint": fault.hint}
