"""containerd's side of NRI: takes one plugin on a socket, and calls it as containerd 2.4.2 does.

Its frames are put together here by hand, from the measured bytes, and not by the code under test. A frame of more
than 4,096 bytes ends the connection, an event that the version does not know ends the registration, calls come one
after the other, and a plugin that is late loses its connection.
"""

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from google.protobuf.message import Message

from crust.wire.nri.v1alpha1 import nri_pb2
from crust.wire.ttrpc.v1 import ttrpc_pb2

FRAME_MAX = 4096
PLUGIN = "nri.pkg.api.v1alpha1.Plugin"


class PluginRefused(Exception):
    """The plugin answered with an error."""


class PluginGone(Exception):
    """The connection has ended, or the plugin was late: the engine goes on without it."""


@dataclass
class Engine:
    """One engine. `events` are those that its version has."""

    version: str = "2.4.2+unknown"
    nri_version: str = "v0.12.3"
    events: int = (1 << 14) - 1
    timeout_s: float = 2.0
    requires_plugin: bool = False
    """Its default validator's required_plugins."""
    pods: list[nri_pb2.PodSandbox] = field(default_factory=list)
    containers: list[nri_pb2.Container] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.subscribed = 0
        self.registered = asyncio.Event()
        self.lost = asyncio.Event()
        self.connections = 0
        self._streams = itertools.count(1, 2)
        self._answers: dict[int, asyncio.Future[ttrpc_pb2.Response]] = {}
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a plugin."""
        self.connections += 1
        self._writer = writer
        self.lost.clear()
        work: set[asyncio.Task[None]] = set()
        texts = {1: b"", 2: b""}
        try:
            while True:
                connection, length = struct.unpack(">II", await reader.readexactly(8))
                if length > FRAME_MAX:
                    break
                texts[connection] += await reader.readexactly(length)
                while (message := _first(texts[connection])) is not None:
                    stream, kind, data = message
                    texts[connection] = texts[connection][10 + len(data) :]
                    if connection == 1 and kind == 2:
                        self._answers.pop(stream).set_result(ttrpc_pb2.Response.FromString(data))
                    elif connection == 2 and kind == 1:
                        work.add(asyncio.create_task(self._register(stream, data)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.disconnect()
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    def disconnect(self) -> None:
        """End the connection, as the engine does with a plugin that was late."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.registered.clear()
        self.lost.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(PluginGone())
        self._answers.clear()

    async def _register(self, stream: int, data: bytes) -> None:
        request = ttrpc_pb2.Request.FromString(data)
        assert request.service == "nri.pkg.api.v1alpha1.Runtime"
        assert request.method == "RegisterPlugin"
        self._send(2, _message(stream, 2, ttrpc_pb2.Response()))
        configured = nri_pb2.ConfigureResponse.FromString(
            await self.raw(
                "Configure",
                nri_pb2.ConfigureRequest(
                    runtime_name="containerd",
                    runtime_version=self.version,
                    registration_timeout=5000,
                    request_timeout=int(self.timeout_s * 1000),
                    nri_version=self.nri_version,
                ),
            )
        )
        if configured.events & ~self.events:  # "invalid plugin events"
            self.disconnect()
            return
        self.subscribed = configured.events
        listed = nri_pb2.SynchronizeRequest(pods=self.pods, containers=self.containers)
        await self.raw("Synchronize", listed)
        self.registered.set()

    async def raw(self, method: str, message: Message) -> bytes:
        """The payload of the plugin's answer. Raises PluginRefused, PluginGone."""
        return await self.call(method, message.SerializeToString())

    async def call(self, method: str, payload: bytes, service: str = PLUGIN) -> bytes:
        """The same with any bytes."""
        stream = next(self._streams)
        answered = asyncio.get_running_loop().create_future()
        self._answers[stream] = answered
        request = ttrpc_pb2.Request(service=service, method=method, payload=payload)
        self._send(1, _message(stream, 1, request))
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await answered
        except TimeoutError:
            self._answers.pop(stream, None)
            self.disconnect()
            raise PluginGone from None
        if response.status.code:
            raise PluginRefused(response.status.message)
        answer: bytes = response.payload
        return answer

    async def create(self, pod: nri_pb2.PodSandbox, container: nri_pb2.Container) -> None:
        """CreateContainer, then the validation where the plugin has subscribed to it, as containerd 2.2 does.

        A plugin that is lost in the first is skipped; in the second it refuses this container, and no later one.
        """
        request = nri_pb2.ContainerRequest(pod=pod, container=container)
        validates = self.subscribed & 1 << 13
        with contextlib.suppress(PluginGone):
            await self.raw("CreateContainer", request)
        if validates and not self.registered.is_set():
            self.subscribed = 0
            raise PluginRefused("validator plugin 99-crust failed: ttrpc: closed")
        if self.requires_plugin and not self.registered.is_set():
            raise PluginRefused(
                'validator "00-default-validator" rejected container adjustment, reason: validation error: '
                'required plugin "crust" not present'
            )
        if validates:
            await self.raw("ValidateContainerAdjustment", request)

    async def start(self, pod: nri_pb2.PodSandbox, container: nri_pb2.Container) -> None:
        """StartContainer by the method of NRI 0.12, or by StateChange before it."""
        if self.nri_version:
            request = nri_pb2.ContainerRequest(pod=pod, container=container)
            await self.raw("StartContainer", request)
        else:
            await self.raw(
                "StateChange",
                nri_pb2.StateChangeEvent(
                    event=nri_pb2.START_CONTAINER, pod=pod, container=container
                ),
            )

    async def stop(self, pod: nri_pb2.PodSandbox, container: nri_pb2.Container) -> None:
        """StopContainer."""
        await self.raw("StopContainer", nri_pb2.ContainerRequest(pod=pod, container=container))

    def _send(self, connection: int, data: bytes) -> None:
        if self._writer is None:
            raise PluginGone
        for at in range(0, len(data), FRAME_MAX):
            part = data[at : at + FRAME_MAX]
            self._writer.write(struct.pack(">II", connection, len(part)) + part)


def _first(text: bytes) -> tuple[int, int, bytes] | None:
    if len(text) < 10:
        return None
    length, stream, kind, _ = struct.unpack(">IIBB", text[:10])
    return (stream, kind, text[10 : 10 + length]) if len(text) >= 10 + length else None


def _message(stream: int, kind: int, message: Message) -> bytes:
    data = message.SerializeToString()
    return struct.pack(">IIBB", len(data), stream, kind, 0) + data


@contextlib.asynccontextmanager
async def serving(path: str, engine: Engine) -> AsyncIterator[Engine]:
    """Listen at `path` while the block runs."""
    server = await asyncio.start_unix_server(engine.serve, path)
    try:
        yield engine
    finally:
        server.close()
        engine.disconnect()
        await server.wait_closed()


def pod(id_: str = "sandbox-0001", *, handler: str = "kata", pid: int = 0) -> nri_pb2.PodSandbox:
    """A pod as the engine describes it."""
    return nri_pb2.PodSandbox(
        id=id_, name="web", uid="u", namespace="shop", runtime_handler=handler, pid=pid
    )


def container(
    *mounts: tuple[str, str],
    id_: str = "container-0001",
    pod_id: str = "sandbox-0001",
    state: int = 0,
) -> nri_pb2.Container:
    """A container with bind mounts (source, destination)."""
    return nri_pb2.Container(
        id=id_,
        pod_sandbox_id=pod_id,
        name="app",
        state=nri_pb2.ContainerState.ValueType(state),
        mounts=[
            nri_pb2.Mount(source=source, destination=destination, type="bind", options=["rbind"])
            for source, destination in mounts
        ],
    )
