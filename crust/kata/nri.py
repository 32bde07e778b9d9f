"""The NRI plugin: the container engine asks it before a container is created, and again before its process starts.

An error answer refuses the container, and its text reaches the pod's event. So the plugin answers every failure with
an error: a malformed call, an exceeded time, an unexpected exception. If the plugin dies or hangs in CreateContainer,
the engine skips it, unless the plugin has subscribed to the validation of the same container as well (containerd
2.2): then the engine refuses.

This file decodes pods and containers into values (`Pod`, `Container`); `gate` decides which may use a volume.
The engine asks all plugins under one lock, and ends the connection of a late plugin: a call ends at 80 % of the time
that the engine gives it.
"""

import asyncio
import logging
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.message import DecodeError, Message

from crust.core import errors
from crust.host.mounts import propagation
from crust.kata import ttrpc
from crust.wire.nri.v1alpha1 import nri_pb2
from crust.wire.nri.v1alpha1.nri_pb2 import Event

_log = logging.getLogger(__name__)

NAME, INDEX = "crust", "99"
"""Last in the engine's order: plugins before it may add mounts."""

_PLUGIN = "nri.pkg.api.v1alpha1.Plugin"
_RUNTIME = "nri.pkg.api.v1alpha1.Runtime"
_METHODS = {
    "CreateContainer": Event.CREATE_CONTAINER,
    "StartContainer": Event.START_CONTAINER,
    "StopContainer": Event.STOP_CONTAINER,
    "RemoveContainer": Event.REMOVE_CONTAINER,
}
_CONTAINER_CALLS = {**_METHODS, "ValidateContainerAdjustment": Event.VALIDATE_CONTAINER_ADJUSTMENT}
_DEADLINE_SHARE = 0.8
"""The part of the engine's time after which a call ends."""
_TIME_S = 2.0
"""An engine's default for one call."""
_READ_BYTES = 64 * 1024
_CALLS_MAX = 64
_SYNCHRONIZED_MAX = 10_000
"""Containers of a node that are taken from the engine; a kubelet runs 110 pods."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount of a container as the engine will give it to the runtime; `source` is literal."""

    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class Container:
    """A container of a pod, with its bind mounts. `is_created`: it is created, its process was not started yet."""

    id: str
    pod_id: str
    name: str
    mounts: tuple[Mount, ...]
    is_created: bool = False
    is_running: bool = False
    is_stopped: bool = False
    pid: int = 0
    """Its first process; of Kata the virtual machine's; 0 if the engine names none."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A sandbox. `handler` is the CRI call's, "" for the engine's default; `pid` 0: the engine names none."""

    id: str
    name: str
    handler: str
    pid: int


class Gate(Protocol):
    """Decides about containers. `deadline_s` is of time.monotonic(); an error of any class refuses."""

    async def create(self, pod: Pod, container: Container, deadline_s: float) -> None:
        """The container is about to be created. Called again for its validation: idempotent."""

    async def start(self, pod: Pod, container: Container, deadline_s: float) -> None:
        """The runtime has created it, and its process is about to start."""

    async def ended(self, container: Container) -> None:
        """The container was stopped or removed. The engine's answer does not wait for this."""

    async def synchronize(self, pods: dict[str, Pod], containers: list[Container]) -> None:
        """All containers of the node, after each connection."""


async def serve(path: str, gate: Gate, on_registered: Callable[[], None]) -> None:
    """Connect to the engine's socket, register, and answer until the connection ends.

    `on_registered` is called when the engine has accepted the plugin. Raises `PluginNotRegistered`,
    `ProtocolViolated`, `EngineInOtherNamespace`, `EngineUnavailable`, `NotSeen`.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as err:
        raise _unavailable(f"the NRI socket {path} cannot be reached", err) from err
    try:
        line = writer.get_extra_info("socket")
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
        pid, _, _ = struct.unpack("iII", credentials)
        # a mount source has one meaning only within a mount namespace: another one may not have the guard mount
        if not propagation.has_mounts_of(pid):
            raise errors.NotReady.named(
                "EngineInOtherNamespace",
                "crust kata does not serve the container engine",
                why=f"the engine, process {pid}, has another mount namespace",
            )
        await _Session(reader, writer, gate, on_registered).answer_calls()
    except ConnectionError as err:
        failure = "the container engine ended the connection of the NRI plugin"
        raise _unavailable(failure, err) from err
    finally:
        writer.close()


def _unavailable(failure: str, err: OSError) -> errors.CrustError:
    return errors.PeerUnavailable.named("EngineUnavailable", failure, why=err.strerror or str(err))


@dataclass(eq=False)
class _Session:
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _gate: Gate
    _on_registered: Callable[[], None]
    _calls: set[asyncio.Task[None]] = field(default_factory=set)
    _time_s: float = _TIME_S
    _pods: dict[str, Pod] = field(default_factory=dict)
    _containers: list[Container] = field(default_factory=list)

    async def answer_calls(self) -> None:
        registration = nri_pb2.RegisterPluginRequest(plugin_name=NAME, plugin_idx=INDEX)
        call = ttrpc.request(1, _RUNTIME, "RegisterPlugin", registration)
        self._writer.write(ttrpc.frames_of(ttrpc.PLUGIN_CALLS, call))
        frames = ttrpc.frame_splitter()
        streams = {
            ttrpc.ENGINE_CALLS: ttrpc.message_splitter(),
            ttrpc.PLUGIN_CALLS: ttrpc.message_splitter(),
        }
        try:
            while data := await self._reader.read(_READ_BYTES):
                for connection, payload in frames.feed(data):
                    if connection in streams:
                        self._take(connection, streams[connection].feed(payload))
        finally:
            for running in self._calls:
                running.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    def _take(self, connection: int, messages: list[ttrpc.CallMessage]) -> None:
        for message in messages:
            if connection == ttrpc.PLUGIN_CALLS and message.kind == ttrpc.RESPONSE:
                answer = ttrpc.parse_response(message)
                if isinstance(answer, ttrpc.Failure):
                    raise errors.NotReady.named(
                        "PluginNotRegistered",
                        "the container engine refused the NRI plugin",
                        why=answer.text[:300] or f"code {answer.code}",
                    )
            elif connection == ttrpc.ENGINE_CALLS and message.kind == ttrpc.REQUEST:
                began_s = asyncio.get_running_loop().time()
                if len(self._calls) >= _CALLS_MAX:
                    refusal = ttrpc.Failure(ttrpc.UNKNOWN, "crust: too many calls at once")
                    self._answer(message.stream, refusal)
                    continue
                # in a task of its own: a slow call must not delay the other calls of the node
                self._spawn(self._call(message, began_s))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self, message: ttrpc.CallMessage, began_s: float) -> None:
        method = ""
        try:
            request = ttrpc.parse_request(message)
            method = request.method if request.service == _PLUGIN else ""
            answer = await self._answered(method, request.payload, began_s)
        except (errors.CrustError, DecodeError) as error:
            shown = f"[MalformedMessage] {error}"
            if isinstance(error, errors.CrustError):
                shown = error.shown()
            answer = ttrpc.Failure(ttrpc.UNKNOWN, f"crust: {shown}")
            _log.warning("refused", extra={"call": method, "error": answer.text})
        except Exception as error:
            answer = ttrpc.Failure(
                ttrpc.UNKNOWN,
                f"crust: [UnexpectedError] {type(error).__name__}; read the log of crust kata",
            )
            _log.error("failed unexpectedly", extra={"call": method}, exc_info=True)
        self._answer(message.stream, answer)

    async def _answered(self, method: str, data: bytes, began_s: float) -> Message | ttrpc.Failure:
        if method == "Configure":
            engine = nri_pb2.ConfigureRequest.FromString(data)
            if engine.request_timeout > 0:
                self._time_s = engine.request_timeout / 1000
            # an engine without the event would refuse the registration; since NRI 0.12 it names NRI's version
            version = re.match(r"v?(\d+)\.(\d+)", engine.runtime_version)
            is_new = version is not None and (int(version[1]), int(version[2])) >= (2, 2)
            validates = bool(engine.nri_version) or (is_new and engine.runtime_name == "containerd")
            name = f"{engine.runtime_name[:64]} {engine.runtime_version[:64]}"
            extra = {"engine": name, "validates": validates}
            _log.info("the container engine asks before each container", extra=extra)
            events = (_CONTAINER_CALLS if validates else _METHODS).values()
            return nri_pb2.ConfigureResponse(events=sum(1 << (number - 1) for number in events))
        if method == "Synchronize":
            node = nri_pb2.SynchronizeRequest.FromString(data)
            self._pods.update((pod.id, pod_of(pod)) for pod in node.pods)
            self._containers.extend(map(container_of, node.containers))
            if len(self._containers) > _SYNCHRONIZED_MAX:
                why = f"there are {len(self._containers)}"
                raise ttrpc.ProtocolViolated("too many containers", why)
            if not node.more:
                # answer first: until then the engine creates and starts no container of the node
                self._spawn(_logged(self._gate.synchronize(self._pods, self._containers)))
                self._pods, self._containers = {}, []
                self._on_registered()
            return nri_pb2.SynchronizeResponse(more=node.more)
        if method == "StateChange":
            change = nri_pb2.StateChangeEvent.FromString(data)
            return await self._event(change.event, change.pod, change.container, began_s)
        if (event := _CONTAINER_CALLS.get(method)) is not None:
            request = nri_pb2.ContainerRequest.FromString(data)
            return await self._event(event, request.pod, request.container, began_s)
        if method == "Shutdown":
            return nri_pb2.ConfigureResponse()
        return ttrpc.Failure(ttrpc.UNIMPLEMENTED, f"crust does not serve {method[:64]!r}")

    async def _event(
        self, event: int, pod: nri_pb2.PodSandbox, container: nri_pb2.Container, began_s: float
    ) -> Message:
        deadline_s = began_s + self._time_s * _DEADLINE_SHARE
        nri_pod, nri_container = pod_of(pod), container_of(container)
        if event in (Event.CREATE_CONTAINER, Event.VALIDATE_CONTAINER_ADJUSTMENT):
            await self._gate.create(nri_pod, nri_container, deadline_s)
        elif event == Event.START_CONTAINER:
            await self._gate.start(nri_pod, nri_container, deadline_s)
        elif event in (Event.STOP_CONTAINER, Event.REMOVE_CONTAINER):
            self._spawn(_logged(self._gate.ended(nri_container)))  # it can refuse nothing
        # without a field: every method's empty answer
        return nri_pb2.ValidateContainerAdjustmentResponse()

    def _answer(self, stream: int, answer: Message | ttrpc.Failure) -> None:
        self._writer.write(ttrpc.frames_of(ttrpc.ENGINE_CALLS, ttrpc.response(stream, answer)))


async def _logged(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:
        _log.exception("work for containers of the node has failed")


def pod_of(pod: nri_pb2.PodSandbox) -> Pod:
    return Pod(pod.id, f"{pod.namespace}/{pod.name}", pod.runtime_handler, pod.pid)


def container_of(container: nri_pb2.Container) -> Container:
    # as runc decides it; the source of any other mount is the name of a filesystem, and no path
    binds = (
        Mount(mount.source, mount.destination)
        for mount in container.mounts
        if mount.type == "bind" or not {"bind", "rbind"}.isdisjoint(mount.options)
    )
    return Container(
        container.id,
        container.pod_sandbox_id,
        container.name,
        tuple(binds),
        is_created=container.state == nri_pb2.CONTAINER_CREATED,
        is_running=container.state in (nri_pb2.CONTAINER_RUNNING, nri_pb2.CONTAINER_PAUSED),
        is_stopped=container.state == nri_pb2.CONTAINER_STOPPED,
        pid=container.pid,
    )
