"""The metrics and the health of a daemon over HTTP: `/metrics`, `/healthz`, `/readyz`; anything else is 404.

`/healthz` is for a liveness probe: it fails if the event loop does not answer, or if the process itself is broken and
a restart would help. `/readyz` fails until everything is served, and while a driver or the pool is away. Threads
serve them, so a loop that hangs is an answer of 503, and the metrics can still be read.

There is no authentication: the address belongs on a loopback, or behind a network policy. A client cannot exhaust
the threads and descriptors that the node's calls need: with too many connections the oldest one is closed, so a probe
is answered while other connections stay open. The metrics are rendered once a second at most (`PAGE_S`).
"""

import asyncio
import concurrent.futures
import errno
import http.server
import logging
import math
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import prometheus_client
from prometheus_client import exposition

from crust.core import errors
from crust.host.process import syscalls
from crust.rpc.serving import daemon

_log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""How long the event loop may take to answer."""

CONNECTIONS = 32
"""The largest number of connections; each has a thread."""

PAGE_S = 1.0
"""The age up to which the text of the metrics is sent again: a scraper asks every few seconds, a flood more often."""

_OPEN = "application/openmetrics-text"


@dataclass(eq=False)
class _Monitor:
    """Asks the daemon of this process, in its loop."""

    _loop: asyncio.AbstractEventLoop
    _daemon: daemon.Daemon | None = None

    def set_daemon(self, started: daemon.Daemon) -> None:
        self._daemon = started

    def check_health(self) -> None:
        self._in_loop(lambda: self._daemon.health.check_healthy() if self._daemon else None)

    def check_ready(self) -> None:
        if self._daemon is None:
            raise daemon.NotServing()
        self._in_loop(self._daemon.check_ready)

    def _in_loop(self, check: Callable[[], None]) -> None:
        answer: concurrent.futures.Future[None] = concurrent.futures.Future()

        def ask() -> None:
            try:
                check()
            except errors.CrustError as error:
                answer.set_exception(error)
            else:
                answer.set_result(None)

        self._loop.call_soon_threadsafe(ask)
        try:
            answer.result(ANSWER_S)
        except concurrent.futures.TimeoutError:
            raise errors.RuntimeFailed.named(
                "LoopHangs",
                "this process hangs",
                why=f"its event loop has not answered for {ANSWER_S:g} s",
            ) from None


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, monitor: _Monitor) -> None:
        self.address_family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        self.monitor = monitor
        self._rendering = threading.Lock()
        self._texts: dict[str, tuple[float, bytes]] = {}
        self._connected: deque[socket.socket] = deque()
        super().__init__((host, port), _Answers)

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """The text and its type, rendered once in `PAGE_S` for each of two formats, however many clients read it.

        A client chooses between the formats alone: versions and escapings of its choice would be texts without a
        bound. Clients that come while it is rendered wait for it.
        """
        encode, kind = exposition.choose_encoder(_OPEN if _OPEN in accept else "")
        with self._rendering:
            rendered_s, text = self._texts.get(kind, (-math.inf, b""))
            if time.monotonic() - rendered_s >= PAGE_S:
                text = encode(prometheus_client.REGISTRY)
                self._texts[kind] = time.monotonic(), text
            return text, kind

    def process_request(self, request: Any, client_address: Any) -> None:
        """Close the oldest connection if there are too many, which ends its thread. Only `serve_forever` calls it."""
        self._connected = deque(peer for peer in self._connected if peer.fileno() >= 0)
        if len(self._connected) >= CONNECTIONS:
            try:
                self._connected.popleft().shutdown(socket.SHUT_RDWR)
            except OSError as err:  # it is closed meanwhile
                if err.errno not in (errno.ENOTCONN, errno.EBADF):
                    raise
        self._connected.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors in the log's form, except that a client went away."""
        if not isinstance(sys.exc_info()[1], OSError):
            _log.error("a request for metrics or health failed", exc_info=True)


class _Answers(http.server.BaseHTTPRequestHandler):
    timeout = 10
    server: _Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(200, *self.server.metrics(self.headers.get("Accept", "")))
        elif path == "/healthz":
            self._answer(self.server.monitor.check_health)
        elif path == "/readyz":
            self._answer(self.server.monitor.check_ready)
        else:
            self._send(404, b"there are /metrics, /healthz and /readyz\n")

    do_HEAD = do_GET

    def _answer(self, check: Callable[[], None]) -> None:
        try:
            check()
        except errors.CrustError as error:
            self._send(503, f"{error.shown()}\n".encode())
        else:
            self._send(200, b"ok\n")

    def _send(self, code: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the metrics are read every few seconds."""


@contextmanager
def serving(address: str) -> Iterator[None]:
    """Serve at `address` while the block runs, unless it is empty. Raises an error if the address cannot be used."""
    if not address:
        yield
        return
    host, _, port = address.rpartition(":")
    monitor = _Monitor(asyncio.get_running_loop())
    with syscalls.translating(f"cannot serve metrics on {address}"):
        try:
            server = _Server(host.strip("[]"), int(port), monitor)
        except OverflowError as err:
            raise errors.InvalidRequest(
                f"cannot serve metrics on {address}", why="a port is at most 65535"
            ) from err
    daemon.started.set(monitor.set_daemon)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    _log.info("metrics", extra={"address": f"{host}:{server.server_port}"})
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
