"""Node servicers of this process, around which `crust.csi_shim.library` puts deferral: of grpc.aio, and of grpc.

`deferral.Deferral` runs on an event loop. A servicer of grpc.aio is on one already. One of grpc (threads) gets a
loop in a thread (`BlockingRuntime`): its flagged calls wait there, and the servicer's own methods run in threads of
that loop. An exception of the servicer that is no answer (`abort`, an error of crust) is the author's: it
is logged with an id, and the answer has the id and no text of the exception.
"""

import asyncio
import contextlib
import inspect
import logging
import secrets
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from crust import errors
from crust.csi_shim.deferral import Deferral
from crust.csi_shim.drivers_messages import DriversMessages, like, ours
from crust.csi_shim.runtime_client import RuntimeClient
from crust.rpc import status
from crust.rpc.channel import connect
from crust.rpc.driver_facts import advertises_deferral
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

_log = logging.getLogger(__name__)

_STATUS: dict[object, grpc.StatusCode] = {
    key: code for code in grpc.StatusCode for key in (code, code.value[0])
}
"""By itself and by its number: the two kinds of gRPC give the one or the other, or None."""

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class WrongKindOfServicer(errors.InvalidRequest):
    """A servicer of grpc was wrapped for grpc.aio, or the other way round."""

    def __init__(self, servicer: object, *, is_async: bool) -> None:
        kind, other = ("grpc.aio", "grpc") if is_async else ("grpc", "grpc.aio")
        give = "connect_blocking(…)" if not is_async else "RuntimeClient(channel) of connect(…)"
        super().__init__(
            f"{type(servicer).__name__} cannot be wrapped for a server of {other}",
            why=f"its NodePublishVolume is a method for a server of {kind}",
            hint=f"give wrap what {give} gives",
        )


class DriverRaised(errors.RuntimeFailed):
    """A method of the wrapped servicer raised an exception, which is no answer of gRPC. The driver's log has it."""

    def __init__(self, servicer: str, rpc: str, error_id: str) -> None:
        super().__init__(
            f"{rpc} failed in the driver's {servicer}",
            why="it raised an exception",
            hint=f"the driver's log has it under id {error_id}",
        )
        self.error_id = error_id


class PublishNotUndone(errors.RuntimeFailed):
    """The wrapped servicer refused an unpublish by which a publish was to be undone."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(
            "the publish was not undone",
            why=f"the driver answered NodeUnpublishVolume with {code}: {details}",
            hint="the caller will call NodeUnpublishVolume",
        )


@dataclass(frozen=True, slots=True)
class BlockingRuntime:
    """The proxy's Runtime API for a servicer of grpc: a client, and the event loop on which it works."""

    client: RuntimeClient
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


@contextlib.contextmanager
def connect_blocking(socket_path: str) -> Iterator[BlockingRuntime]:
    """Connect to the proxy's runtime socket, for a servicer of grpc; the connection's thread ends with the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="crust deferral", daemon=True)
    thread.start()
    connection = _Connection(socket_path)
    try:
        runtime = BlockingRuntime(cast("RuntimeClient", None), loop)
        client = runtime.run(connection.open())
        try:
            yield BlockingRuntime(client, loop)
        finally:
            runtime.run(connection.stack.aclose())
            runtime.run(loop.shutdown_default_executor())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Connection:
    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self.stack = contextlib.AsyncExitStack()

    async def open(self) -> RuntimeClient:
        return RuntimeClient(await self.stack.enter_async_context(connect(self._path)))


class Servicer:
    """Adapts a servicer, of either kind, to `deferral.InnerNode`."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.messages = DriversMessages()
        self.is_async = inspect.iscoroutinefunction(inspect.unwrap(self._node.NodePublishVolume))

    async def publish(
        self, request: csi_pb2.NodePublishVolumeRequest, context: Any
    ) -> csi_pb2.NodePublishVolumeResponse:
        answer = await self._call("NodePublishVolume", request, context)
        return ours(csi_pb2.NodePublishVolumeResponse, answer)

    async def unpublish(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: Any, timeout_s: float
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        async with asyncio.timeout(timeout_s):
            answer = await self._call("NodeUnpublishVolume", request, _Undo(context))
            return ours(csi_pb2.NodeUnpublishVolumeResponse, answer)

    async def expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, context: Any
    ) -> csi_pb2.NodeExpandVolumeResponse:
        answer = await self._call("NodeExpandVolume", request, context)
        return ours(csi_pb2.NodeExpandVolumeResponse, answer)

    async def defers(self, context: Any) -> bool:
        request = csi_pb2.NodeGetCapabilitiesRequest()
        answer = await self._call("NodeGetCapabilities", request, context)
        return advertises_deferral(ours(csi_pb2.NodeGetCapabilitiesResponse, answer))

    async def _call(self, rpc: str, request: Message, context: Any) -> Any:
        method = getattr(self._node, rpc)
        theirs = self.messages.theirs(request)
        try:
            if self.is_async:
                answer = await method(theirs, context)
            else:
                answer = await asyncio.to_thread(method, theirs, context)
            refused = _STATUS.get(context.code(), grpc.StatusCode.OK)
            if refused is not grpc.StatusCode.OK:  # by set_code, with a message that means nothing
                ends = context.abort(refused, _text(context.details()))
                if self.is_async:
                    await ends
            return answer
        except errors.CrustError:
            raise
        except Exception as error:
            if _is_answer(error):
                raise
            error_id = secrets.token_hex(6)
            name = type(self._node).__name__
            _log.exception("%s.%s raised an exception, id %s", name, rpc, error_id)
            raise DriverRaised(name, rpc, error_id) from error


class _Undo:
    """The context of an unpublish within a publish. Its refusal must not be sent as the publish's: a CO would take
    NOT_FOUND for "nothing is published".
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._code: Any = grpc.StatusCode.OK
        self._details = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def set_code(self, code: Any) -> None:
        """As gRPC has it."""
        self._code = code

    def set_details(self, details: str) -> None:
        """As gRPC has it."""
        self._details = details

    def code(self) -> Any:
        """As gRPC has it."""
        return self._code

    def details(self) -> str:
        """As gRPC has it."""
        return self._details

    def abort(self, code: Any, details: str = "", *_: Any, **__: Any) -> NoReturn:
        """As both kinds of gRPC have it: what it raises is raised before it can be awaited."""
        raise PublishNotUndone(getattr(code, "name", str(code)), details)


def _text(details: Any) -> str:
    """grpc keeps bytes of what it was given."""
    return details.decode("utf-8", "replace") if isinstance(details, bytes) else str(details or "")


def _is_answer(error: Exception) -> bool:
    """Whether the method has called abort: grpc.aio has a class for it, grpc raises an empty Exception."""
    return isinstance(error, grpc.aio.AbortError) or (type(error) is Exception and not error.args)


class Wrapped(csi_pb2_grpc.NodeServicer):
    """The inner servicer, except for the three calls that may be flagged: for grpc.aio."""

    def __init__(self, inner: object, servicer: Servicer, deferral: Deferral) -> None:
        self._inner: Any = inner
        self._servicer = servicer
        self._deferral = deferral
        for method in csi_pb2.DESCRIPTOR.services_by_name["Node"].methods:
            if method.name not in vars(Wrapped) and hasattr(inner, method.name):
                setattr(self, method.name, getattr(inner, method.name))

    async def NodePublishVolume(self, request: Any, context: Any) -> Any:
        return await self._answer("NodePublishVolume", request, context)

    async def NodeGetVolumeStats(self, request: Any, context: Any) -> Any:
        return await self._answer("NodeGetVolumeStats", request, context)

    async def NodeExpandVolume(self, request: Any, context: Any) -> Any:
        return await self._answer("NodeExpandVolume", request, context)

    async def _answer(self, rpc: str, request: Any, context: Any) -> Any:
        work = flagged(self._servicer, self._deferral, request, context)
        if work is None:
            return await getattr(self._inner, rpc)(request, context)
        try:
            return like(await work, request)
        except errors.CrustError as error:  # the driver's own server does not know crust's errors
            return await status.abort(context, error, is_csi=True)


class BlockingWrapped:
    """The same for grpc."""

    def __init__(
        self, inner: object, servicer: Servicer, deferral: Deferral, runtime: BlockingRuntime
    ) -> None:
        self._inner: Any = inner
        self._servicer = servicer
        self._deferral = deferral
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        """All other calls, the driver's own additions included, are the servicer's."""
        return getattr(self._inner, name)

    def NodePublishVolume(self, request: Any, context: Any) -> Any:
        return self._answer("NodePublishVolume", request, context)

    def NodeGetVolumeStats(self, request: Any, context: Any) -> Any:
        return self._answer("NodeGetVolumeStats", request, context)

    def NodeExpandVolume(self, request: Any, context: Any) -> Any:
        return self._answer("NodeExpandVolume", request, context)

    def _answer(self, rpc: str, request: Any, context: Any) -> Any:
        work = flagged(self._servicer, self._deferral, request, context)
        if work is None:
            return getattr(self._inner, rpc)(request, context)
        try:
            return like(self._runtime.run(work), request)
        except errors.CrustError as error:
            context.abort(status.code_of(error), error.shown())


def flagged(
    servicer: Servicer, deferral: Deferral, request: Message, context: Any
) -> Coroutine[Any, Any, Message] | None:
    """The work that answers a flagged call; None for a call that is the servicer's own."""
    servicer.messages.learn(request)
    name = request.DESCRIPTOR.name
    if name == "NodePublishVolumeRequest":
        publish = ours(csi_pb2.NodePublishVolumeRequest, request)
        return deferral.publish(publish, context) if publish.defer_fs_ops else None
    if name == "NodeGetVolumeStatsRequest":
        stats = ours(csi_pb2.NodeGetVolumeStatsRequest, request)
        return deferral.stats(stats) if stats.defer_fs_ops else None
    expand = ours(csi_pb2.NodeExpandVolumeRequest, request)
    return deferral.expand(expand, context) if expand.defer_fs_ops else None
