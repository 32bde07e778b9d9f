"""How the parts of a process reach one another, and everybody else: by the path of a socket.

A part serves at a path and calls a path. Between processes both are sockets. Where several parts run in one process,
the paths that they have in common are wired: a call to one goes to its servicers without a socket, whichever part is
started first.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import grpc

from crust.rpc.in_process.local import LocalPort, LocalServer
from crust.rpc.port import Port, SocketPort
from crust.rpc.serving import server
from crust.rpc.serving.daemon import Daemon


class Wiring:
    """Wires the paths `inner`, which then have no socket, and the paths `shared`, which other processes call too."""

    def __init__(self, inner: Iterable[str] = (), shared: Iterable[str] = ()) -> None:
        self._inner = frozenset(inner)
        self._servers = {path: LocalServer() for path in (*self._inner, *shared)}

    def connect(self, path: str) -> Port:
        """A port to the part that serves at `path`, now or later. The caller closes it. Raises as `SocketPort`."""
        local = self._servers.get(path)
        return SocketPort(path) if local is None else LocalPort(local)

    @asynccontextmanager
    async def serving(  # noqa: PLR0913 - one per part of a server
        self,
        path: str,
        *add_servicers: server.AddServicer,
        name: str,
        daemon: Daemon,
        lock_path: str | None = "",
        generic: Sequence[grpc.GenericRpcHandler] = (),
        admit: Callable[[str], None] | None = None,
        driver: Callable[[], str] = lambda: "",
    ) -> AsyncIterator[None]:
        """Serve at `path` while the block runs, as `server.serving` does where others call it."""
        local = self._servers.get(path)
        if local is not None:
            local.open(name, daemon.health, generic, admit, driver)
            for add_servicer in add_servicers:
                add_servicer(local)
        try:
            if path in self._inner:
                yield
                return
            served = server.serving(
                path,
                *add_servicers,
                name=name,
                lock_path=lock_path,
                generic=generic,
                daemon=daemon,
                admit=admit,
                driver=driver,
            )
            async with served:
                yield
        finally:
            if local is not None:
                local.close()


SOCKETS = Wiring()
"""For a part that has its process for itself."""
