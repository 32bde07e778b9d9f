"""The runtime side's door: handlers register, and hold their registration by keeping the stream open."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

import crust
from crust import errors, volumes
from crust.proxy.events import Event, Events
from crust.proxy.handlers import Feature, Handler, Handlers
from crust.proxy.peers import HandlerPeers
from crust.rpc import channel
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc, types_pb2

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_FILESYSTEM = re.compile(r"[a-z0-9]{1,32}")
_FEATURES = {feature.value: feature for feature in Feature}


class BadHello(errors.InvalidRequest):
    """A handler introduces itself in a way that cannot be."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "the runtime handler cannot be registered",
            why=why,
            hint="correct the hello: specs/proto/crust/wire/v1/handlers.proto",
        )


class HandlerRegistry(handlers_pb2_grpc.HandlerRegistryServicer):
    """HandlerRegistry: the open stream is the lease."""

    def __init__(
        self, handlers: Handlers, peers: HandlerPeers, events: Events, volumes_directory: str
    ) -> None:
        self._handlers = handlers
        self._peers = peers
        self._events = events
        self._volumes_directory = volumes_directory
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End every stream, so that a server's stop need not wait for them."""
        self._stopping.set()

    async def Register(
        self, request: handlers_pb2.Hello, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[handlers_pb2.Welcome]:
        """Register, welcome, and stay until one side goes."""
        handler = handler_of(request)
        with self._handlers.lease(handler):
            await self._handlers.announce()
            self._tell("handler-registered", handler)
            try:
                yield handlers_pb2.Welcome(
                    volumes_directory=self._volumes_directory, proxy_version=crust.__version__
                )
                await self._stopping.wait()
            finally:
                self._tell("handler-lost", handler)
                await self._peers.drop(handler)

    def _tell(self, kind: str, handler: Handler) -> None:
        _log.info(kind, extra={"handler": handler.name, "endpoint": handler.endpoint})
        self._events.tell(Event(kind, handler=handler.name))


def handler_of(hello: handlers_pb2.Hello) -> Handler:
    """Check a hello; raises `BadHello`. Features that this proxy does not know are left out."""
    if not _NAME.fullmatch(hello.name):
        raise BadHello(f"the name {hello.name[:64]!r} is not 1 to 63 of a-z, 0-9, '-' and '.'")
    try:
        channel.target_of(hello.endpoint)
    except errors.InvalidRequest as err:
        raise BadHello(str(err)) from err
    if types_pb2.VolumeType.BLOCK not in hello.volume_types:
        raise BadHello("volume_types lacks BLOCK, the one type that is handed over")
    bad = [name for name in hello.filesystems if not _FILESYSTEM.fullmatch(name)]
    if bad or not hello.filesystems:
        raise BadHello(f"filesystems holds {bad[0][:32]!r}" if bad else "filesystems is empty")
    return Handler(
        name=volumes.HandlerName(hello.name),
        version=hello.version[:128],
        endpoint=hello.endpoint,
        filesystems=frozenset(hello.filesystems),
        features=frozenset(_FEATURES[each] for each in hello.features if each in _FEATURES),
    )
