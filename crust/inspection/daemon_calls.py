"""Questions to the daemons of this node, and one sentence for a daemon that does not run.

gRPC's own text for an unserved socket names no reason that an operator knows. So the command checks the socket before
the first call: does it exist, may this user open it, does a process listen?
"""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc

from crust.core import errors
from crust.host.process import workers
from crust.inspection import listeners
from crust.rpc import channel
from crust.rpc import status as codes
from crust.rpc.call import Metadata
from crust.rpc.messages import extensions
from crust.rpc.port import SocketPort, stub
from crust.rpc.status import PeerStatus
from crust.wire.v1 import inspect_pb2, inspect_pb2_grpc

Stub: TypeAlias = "inspect_pb2_grpc.InspectAsyncStub"  # a name of the type stubs only

WITH_ERROR_INFO = ((extensions.KEY, extensions.ERROR_INFO),)
"""Metadata: the peer names its error."""

ANSWER_S = 5.0
"""The deadline of a call to the proxy."""

_CONNECT_S = 2.0
_SILENCES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: ("it took too long", "read its log"),
    grpc.StatusCode.UNAVAILABLE: ("the connection was lost", "ask again"),
}
"""Why a daemon did not answer, and what to do, by gRPC's own code."""


class DaemonNotResponding(errors.PeerUnavailable):
    def __init__(self, daemon: str, path: str, why: str, hint: str) -> None:
        super().__init__(f"{daemon} does not answer on {path}", why=why, hint=hint)


def check_socket(daemon: str, path: str, *, start: str) -> None:
    """Raise `DaemonNotResponding` unless a process listens on the unix socket `path`. `start`: how to start it."""
    channel.target_of(path)
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise DaemonNotResponding(daemon, path, "another kind of file is there", "move it away")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
            connected.settimeout(_CONNECT_S)
            connected.connect(path)
    except OSError as err:
        why, hint = listeners.reason(path, err, start)
        raise DaemonNotResponding(daemon, path, why, hint) from err


@asynccontextmanager
async def connected(daemon: str, path: str) -> AsyncIterator[SocketPort]:
    """A daemon's socket. Raises the error that it answers with; `DaemonNotResponding` if it does not answer."""
    async with SocketPort(path) as port:
        try:
            yield port
        except PeerStatus as err:
            if err.code in _SILENCES and not codes.name_in(err.trailing):
                raise DaemonNotResponding(daemon, path, *_SILENCES[err.code]) from err
            raise codes.to_error(err) from err


@asynccontextmanager
async def inspecting(run_dir: str) -> AsyncIterator[Stub]:
    """The proxy's API for operators. Raises `DaemonNotResponding`, and the errors that the proxy answers."""
    path = f"{run_dir}/inspect.sock"
    start = "start crust-node or crust-proxy"
    await workers.run(check_socket, "the proxy", path, start=start)
    async with connected("the proxy", path) as port:
        yield stub(inspect_pb2_grpc.InspectStub, port)


async def drivers(inspect: Stub) -> Sequence[inspect_pb2.ListDriversResponse.Driver]:
    request = inspect_pb2.ListDriversRequest()
    return (await inspect.ListDrivers(request, timeout=ANSWER_S)).drivers


async def deferred(inspect: Stub) -> Sequence[inspect_pb2.DeferredVolume]:
    request = inspect_pb2.ListDeferredVolumesRequest()
    return (await inspect.ListDeferredVolumes(request, timeout=ANSWER_S)).volumes


async def events_of(inspect: Stub) -> AsyncIterator[inspect_pb2.Event]:
    """The proxy's events from now on; returns when the proxy has begun to send them."""
    begun = asyncio.Event()

    async def begin(_: Metadata) -> None:
        begun.set()

    watch: Any = inspect.Watch  # a port's stub, which takes more than the generated type says
    events = watch(inspect_pb2.WatchRequest(), begun=begin)
    first = asyncio.ensure_future(anext(events, None))
    waiting = asyncio.ensure_future(begun.wait())
    try:
        await asyncio.wait((first, waiting), return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            first.result()  # the refusal, if it is one
    except BaseException:
        first.cancel()
        raise
    finally:
        waiting.cancel()
    return _joined(first, events)


async def _joined(
    first: asyncio.Future[inspect_pb2.Event | None], events: AsyncGenerator[inspect_pb2.Event, None]
) -> AsyncIterator[inspect_pb2.Event]:
    try:
        event = await first
        while event is not None:
            yield event
            event = await anext(events, None)
    finally:
        first.cancel()


def reason(err: errors.CrustError | OSError) -> str:
    return err.shown() if isinstance(err, errors.CrustError) else str(err)
