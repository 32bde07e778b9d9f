"""The service HandlerRegistry: a handler registers, and stays registered while its stream is open."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator

import crust
from crust.core import errors, volumes
from crust.proxy.entries import Entries
from crust.proxy.events import Event, Events
from crust.proxy.runtimes.handlers import Feature, Handler, Handlers
from crust.proxy.runtimes.peers import HandlerPeers
from crust.rpc import channel
from crust.rpc.call import Call
from crust.rpc.registration import InvalidRegistration
from crust.wire.v1 import handlers_pb2, types_pb2

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
FILESYSTEMS_MAX = 64
"""Of one handler."""

_FILESYSTEM = re.compile(r"[a-z0-9]{1,32}")
_FEATURES = {feature.value: feature for feature in Feature}


class HandlerRegistry:
    """The service HandlerRegistry: the open stream is the handler session."""

    def __init__(
        self,
        handlers: Handlers,
        peers: HandlerPeers,
        events: Events,
        entries: Entries,
        volumes_directory: str,
    ) -> None:
        self._entries = entries
        self._handlers = handlers
        self._peers = peers
        self._events = events
        self._volumes_directory = volumes_directory
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End every stream, so that the server's stop does not wait for them."""
        self._stopping.set()

    async def Register(
        self, request: handlers_pb2.RegisterRequest, call: Call
    ) -> AsyncIterator[handlers_pb2.RegisterResponse]:
        """Register the handler, respond, and keep the session until one side ends it."""
        handler = handler_of(request)
        with self._handlers.session(handler):
            await self._handlers.announce()
            self._report("handler-registered", handler)
            try:
                yield handlers_pb2.RegisterResponse(
                    volumes_directory=self._volumes_directory, proxy_version=crust.__version__
                )
                await self._stopping.wait()
            finally:
                self._report("handler-lost", handler)
                await self._peers.drop(handler)

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
        self._events.emit(Event(kind, handler=handler.name))


def handler_of(request: handlers_pb2.RegisterRequest) -> Handler:
    """Decode and check a request; raises `InvalidRegistration`. Unknown features are ignored."""
    if not _NAME.fullmatch(request.name):
        raise InvalidRegistration(
            f"the name {request.name[:64]!r} is not 1 to 63 of a-z, 0-9, '-' and '.'"
        )
    try:
        channel.target_of(request.endpoint)
    except errors.InvalidRequest as err:
        raise InvalidRegistration(str(err)) from err
    if types_pb2.VolumeType.BLOCK not in request.volume_types:
        raise InvalidRegistration("volume_types lacks BLOCK, the only type that is published")
    if len(request.filesystems) > FILESYSTEMS_MAX:
        raise InvalidRegistration(
            f"it has {len(request.filesystems)} filesystems, and {FILESYSTEMS_MAX} is the most"
        )
    bad = [name for name in request.filesystems if not _FILESYSTEM.fullmatch(name)]
    if bad or not request.filesystems:
        raise InvalidRegistration(
            f"filesystems holds {bad[0][:32]!r}" if bad else "filesystems is empty"
        )
    if request.max_volumes_per_sandbox < 0:
        raise InvalidRegistration("max_volumes_per_sandbox is negative")
    return Handler(
        name=volumes.HandlerName(request.name),
        version=request.version[:128],
        endpoint=request.endpoint,
        filesystems=frozenset(request.filesystems),
        features=frozenset(_FEATURES[each] for each in request.features if each in _FEATURES),
        max_volumes=request.max_volumes_per_sandbox,
    )
