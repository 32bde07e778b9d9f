"""The registered runtime handlers, and the service HandlerRegistry: the open Register stream is the session of one.

Nothing is kept on disk. After a restart of the proxy the handlers register again within a second, so for a short time
after the start a look-up waits for the handler instead of failing.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field

import crust
from crust.core import errors, metrics, volumes
from crust.proxy.entries import Entries
from crust.proxy.events import Event
from crust.rpc import channel
from crust.rpc.call import Call
from crust.rpc.messages import crust_v1
from crust.rpc.messages.crust_v1 import HandlerNameTaken, InvalidRegistration
from crust.rpc.port import Port, SocketPort
from crust.wire.v1 import handlers_pb2

_log = logging.getLogger(__name__)

Feature = volumes.HandlerFeature


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler(crust_v1.RegisterRequest):
    """A registered runtime handler; `port` ends with the session."""

    port: Port = field(repr=False, compare=False)
    registered_at_s: float = field(default_factory=time.time, compare=False)


class Handlers:
    """The registered handlers.

    `grace_s`: how long after the start a look-up waits for a handler to register again.
    """

    def __init__(self, *, grace_s: float) -> None:
        self._live: dict[volumes.HandlerName, Handler] = {}
        self._changed = asyncio.Condition()
        self._grace_until_s = time.monotonic() + grace_s

    @contextmanager
    def session(self, handler: Handler) -> Iterator[None]:
        """Keep the handler registered while the block runs; raises `HandlerNameTaken`."""
        holder = self._live.get(handler.name)
        if holder is not None:
            raise HandlerNameTaken(handler.name, holder.endpoint)
        self._live[handler.name] = handler
        metrics.handlers.set(len(self._live))
        try:
            yield
        finally:
            del self._live[handler.name]
            metrics.handlers.set(len(self._live))

    async def announce(self) -> None:
        """Wake the calls that wait for a handler."""
        async with self._changed:
            self._changed.notify_all()

    def all(self) -> tuple[Handler, ...]:
        """The registered handlers, by name."""
        return tuple(self._live[name] for name in sorted(self._live))

    async def choose(self, name: volumes.HandlerName | None) -> Handler:
        """The handler for a new publish; raises `HandlerNotRegistered`, `AmbiguousHandler`.

        Without a name it is the only one there is. Right after a start the first to register again may look like
        that, so an unnamed publish waits until the grace ends, or a second one is there.
        """
        found = await self._find(name)
        if found is not None:
            return found
        present = sorted(self._live)
        if name is None and len(present) > 1:
            raise errors.NotReady.named(
                "AmbiguousHandler",
                "the mount cannot be deferred: no runtime handler is named",
                why=f"registered are: {', '.join(present)}",
                hint="name one in the volume context: crust.dev/runtime-handler",
            )
        wanted = f"runtime handler {name!r}" if name else "a runtime handler"
        raise errors.NotReady.named(
            "HandlerNotRegistered",
            f"the mount cannot be deferred: {wanted} is needed",
            why=f"registered are: {', '.join(present)}" if present else "none is registered",
            hint="start the handler on this node, or correct crust.dev/runtime-handler",
        )

    async def owner(self, name: volumes.HandlerName) -> Handler:
        """The handler that a volume is published to; raises `HandlerDisconnected`."""
        found = await self._find(name)
        if found is None:
            raise errors.PeerUnavailable.named(
                "HandlerDisconnected",
                f"runtime handler {name!r} cannot be reached",
                why="it is not registered now",
                hint="start it again; running sandboxes are not affected",
            )
        return found

    async def _find(self, name: volumes.HandlerName | None) -> Handler | None:
        """The handler of the name; without a name the only one. Waits until the grace ends while that may change."""

        def is_certain() -> bool:
            return len(self._live) > 1 if name is None else name in self._live

        left_s = self._grace_until_s - time.monotonic()
        if left_s > 0 and not is_certain():
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s), self._changed:
                    await self._changed.wait_for(is_certain)
        if name is not None:
            return self._live.get(name)
        return next(iter(self._live.values())) if len(self._live) == 1 else None


class HandlerRegistry:
    """The service HandlerRegistry."""

    def __init__(self, handlers: Handlers, entries: Entries) -> None:
        self._handlers = handlers
        self._entries = entries
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End every stream, so that the server's stop does not wait for them."""
        self._stopping.set()

    async def Register(
        self, request: handlers_pb2.RegisterRequest, call: Call
    ) -> AsyncIterator[handlers_pb2.RegisterResponse]:
        """Register the handler, respond, and keep the session until one side ends it."""
        handler = handler_of(request)
        async with handler.port:
            with self._handlers.session(handler):
                await self._handlers.announce()
                self._report("handler-registered", handler)
                try:
                    yield handlers_pb2.RegisterResponse(
                        volumes_directory=self._entries.store.root, proxy_version=crust.__version__
                    )
                    await self._stopping.wait()
                finally:
                    self._report("handler-lost", handler)

    async def GetVolumeSecrets(
        self,
        request: handlers_pb2.GetVolumeSecretsRequest,
        call: Call,
    ) -> handlers_pb2.GetVolumeSecretsResponse:
        """The secrets of a volume that a live sandbox of the handler has claimed."""
        target = volumes.TargetPath.parse(request.target_path, role="target_path")
        record = self._entries.table.expect(target.text)
        await self._handlers.owner(volumes.HandlerName(request.handler))
        found = await self._entries.secrets_of(record, request.handler)
        return handlers_pb2.GetVolumeSecretsResponse(secrets=found)

    def _report(self, kind: str, handler: Handler) -> None:
        _log.info(kind, extra={"handler": handler.name, "endpoint": handler.endpoint})
        self._entries.events.emit(Event(kind, handler=handler.name))


def handler_of(request: handlers_pb2.RegisterRequest) -> Handler:
    """Decode and check a request; raises `InvalidRegistration`."""
    offered = crust_v1.registration(request)
    try:
        port = SocketPort(offered.endpoint, answer_max_bytes=channel.HANDLER_ANSWER_MAX_BYTES)
    except errors.InvalidRequest as err:
        raise InvalidRegistration(str(err)) from err
    return Handler(**asdict(offered), port=port)
