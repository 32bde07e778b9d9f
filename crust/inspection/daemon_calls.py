"""Questions to the daemons of this node, and one sentence for a daemon that does not run.

gRPC's own text for an unserved socket names no reason that an operator knows. So the command checks the socket before
the first call: does it exist, may this user open it, does a process listen?

A driver is asked by CSI's Probe, at the socket that the kubelet calls, so it tests the whole chain. If the proxy is
healthy and the chain is not, the shim's socket shows which part is away. A driver's own refusal is shown in the
driver's words: only a process of the chain, by an error's name, or a deadline says that a socket was not answered.
"""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from crust.core import errors
from crust.host.files import listing
from crust.host.process import workers
from crust.inspection import listeners, views
from crust.rpc import channel
from crust.rpc import status as codes
from crust.rpc.call import Call, Metadata
from crust.rpc.messages import extensions
from crust.rpc.port import PeerNotReachable, SocketPort, decoded, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.v1 import inspect_pb2, inspect_pb2_grpc, pool_pb2, pool_pb2_grpc

Stub: TypeAlias = "inspect_pb2_grpc.InspectAsyncStub"  # a name of the type stubs only

WITH_ERROR_INFO = ((extensions.KEY, extensions.ERROR_INFO),)
"""Metadata: the peer names its error."""

ANSWER_S = 5.0
"""The deadline of a call."""

_CAUSE_MAX = 1024
"""Characters of a driver's reason that are shown."""

_PROBE = "/csi.v1.Identity/Probe"
_METADATA = ((extensions.KEY, f"{extensions.ERROR_INFO},{extensions.VERSIONS}"),)
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


async def probed(answer: inspect_pb2.ListDriversResponse.Driver) -> views.DriverRow:
    """The driver as it is now, with the reason if it is not ready."""
    version = shim = ""
    pool: views.Pool | None = None
    problem: errors.CrustError | None = None
    try:
        path, part = answer.socket, f"the proxy for driver {answer.name}"
        await workers.run(check_socket, part, path, start="restart the proxy")
        async with SocketPort(path) as port:
            call = Call(_PROBE, _METADATA, ANSWER_S)
            body = await port.answer(call, csi_pb2.ProbeRequest().SerializeToString())
            probed = decoded(csi_pb2.ProbeResponse.FromString, body, call.method)
            trailing = dict(call.trailing)
            if probed.HasField("ready") and not probed.ready.value:
                raise _not_ready(answer.name, trailing.get(extensions.NOT_READY, b""))
            info = await stub(csi_pb2_grpc.IdentityStub, port).GetPluginInfo(
                csi_pb2.GetPluginInfoRequest(), metadata=_METADATA, timeout=ANSWER_S
            )
            pool = await _pool(port)
        version, shim = info.vendor_version, str(trailing.get(extensions.SHIM_VERSION, ""))
        # without a kubelet, whose socket for device plugins tells it, no process registers the driver
        kubelet = Path(path).parent.parent.parent / "device-plugins" / "kubelet.sock"
        if answer.registration == "waiting" and await workers.run(listing.exists, kubelet):
            problem = errors.NotReady.named(
                "NotRegisteredYet",
                f"the driver {answer.name} is not registered with the kubelet",
                why="the kubelet has not answered to its socket in plugins_registry",
            )
    except PeerStatus as err:
        problem = await workers.run(_diagnosed, answer, err)
    except errors.CrustError as err:
        problem = err
    return views.row(
        views.DriverRow,
        answer,
        state="not-ready" if problem else "ready",
        version=version,
        shim_version=shim,
        pool=pool,
        message=problem.shown() if problem else "",
        error_name=problem.error_name if problem else "",
    )


async def _pool(port: SocketPort) -> views.Pool | None:
    """The space of the driver's pool; None of a driver of others. Raises the refusal: of a pool that hangs too."""
    pool = stub(pool_pb2_grpc.PoolStub, port)
    try:
        answer = await pool.GetPool(pool_pb2.GetPoolRequest(), timeout=ANSWER_S)
    except PeerStatus as refusal:
        if refusal.code is grpc.StatusCode.UNIMPLEMENTED:
            return None
        raise
    conditions = tuple(views.row(views.Problem, condition) for condition in answer.conditions)
    further = tuple(
        views.row(views.Pool, each, conditions=(), further=()) for each in answer.further
    )
    return views.row(views.Pool, answer, conditions=conditions, further=further)


def _not_ready(name: str, cause: str | bytes) -> errors.CrustError:
    """The error of a driver that is not ready; another vendor's driver gives no cause."""
    text = cause.decode(errors="replace") if isinstance(cause, bytes) else cause
    if text:
        why, hint = text[:_CAUSE_MAX], ""
    else:
        why = "it answers Probe with ready = false, and no reason"
        hint = "wait; if it stays so, its log has the reason"
    return errors.NotReady.named(
        "DriverNotReady", f"the driver {name} is not ready", why=why, hint=hint
    )


def _diagnosed(
    answer: inspect_pb2.ListDriversResponse.Driver, err: PeerStatus
) -> errors.CrustError:
    """The problem of the chain. What the driver or a process of the chain says is the answer; silence is examined."""
    name, is_late = codes.name_in(err.trailing), err.code is grpc.StatusCode.DEADLINE_EXCEEDED
    if not name and err.code is grpc.StatusCode.UNAVAILABLE:
        return _not_ready(answer.name, f"it answered {err.code.name}: {err.what}")
    if name != PeerNotReachable.__name__ and (name or not is_late):
        return codes.to_error(err)
    shim = f"the shim of driver {answer.name}"
    try:
        if listing.exists(answer.backend):  # in `crust node` the shim has no socket
            check_socket(shim, answer.backend, start="start crust-shim")
        elif not answer.connected and not is_late:
            todo = "start crust-shim, or correct `backend`"
            why = "the socket does not exist"
            return DaemonNotResponding(shim, answer.backend, why, todo)
    except errors.CrustError as error:
        return error
    if not is_late:  # the shim answers, and names the driver's socket
        return codes.to_error(err)
    return DaemonNotResponding(
        f"the driver {answer.name}",
        f"its own socket, which the shim at {answer.backend} calls",
        f"it did not answer a Probe in {ANSWER_S:.0f} s",
        "start the driver, and read its log",
    )


def reason(err: errors.CrustError | OSError) -> str:
    return err.shown() if isinstance(err, errors.CrustError) else str(err)
