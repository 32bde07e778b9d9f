"""Whether a driver answers through the proxy and its shim: CSI's Probe, with a deadline.

The probe uses the socket that the kubelet calls, so it tests the whole chain. If the proxy is healthy and the chain
is not, the shim's socket shows which part is away. A driver's own refusal is shown in the driver's words: only a
process of the chain, by an error's name, or a deadline says that a socket was not answered.
"""

from pathlib import Path

import grpc

from crust.core import errors
from crust.host.files import listing
from crust.host.process import workers
from crust.inspection import daemon_calls, views
from crust.rpc import status as codes
from crust.rpc.call import Call
from crust.rpc.messages import extensions
from crust.rpc.port import PeerNotReachable, SocketPort, decoded, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.v1 import inspect_pb2, pool_pb2, pool_pb2_grpc

TIMEOUT_S = 5.0
_CAUSE_MAX = 1024
"""Characters of a driver's reason that are shown."""

_PROBE = "/csi.v1.Identity/Probe"
_METADATA = ((extensions.KEY, f"{extensions.ERROR_INFO},{extensions.VERSIONS}"),)


async def driver(answer: inspect_pb2.ListDriversResponse.Driver) -> views.DriverRow:
    """The driver as it is now, with the reason if it is not ready."""
    version = shim = ""
    pool: views.Pool | None = None
    problem: errors.CrustError | None = None
    try:
        path, part = answer.socket, f"the proxy for driver {answer.name}"
        await workers.run(daemon_calls.check_socket, part, path, start="restart the proxy")
        async with SocketPort(path) as port:
            call = Call(_PROBE, _METADATA, TIMEOUT_S)
            body = await port.answer(call, csi_pb2.ProbeRequest().SerializeToString())
            probed = decoded(csi_pb2.ProbeResponse.FromString, body, call.method)
            trailing = dict(call.trailing)
            if probed.HasField("ready") and not probed.ready.value:
                raise _not_ready(answer.name, trailing.get(extensions.NOT_READY, b""))
            info = await stub(csi_pb2_grpc.IdentityStub, port).GetPluginInfo(
                csi_pb2.GetPluginInfoRequest(), metadata=_METADATA, timeout=TIMEOUT_S
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
    )


async def _pool(port: SocketPort) -> views.Pool | None:
    """The space of the driver's pool; None of a driver of others. Raises the refusal: of a pool that hangs too."""
    pool = stub(pool_pb2_grpc.PoolStub, port)
    try:
        answer = await pool.GetPool(pool_pb2.GetPoolRequest(), timeout=TIMEOUT_S)
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
            daemon_calls.check_socket(shim, answer.backend, start="start crust-shim")
        elif not answer.connected and not is_late:
            todo = "start crust-shim, or correct `backend`"
            why = "the socket does not exist"
            return daemon_calls.DaemonNotResponding(shim, answer.backend, why, todo)
    except errors.CrustError as error:
        return error
    if not is_late:  # the shim answers, and names the driver's socket
        return codes.to_error(err)
    return daemon_calls.DaemonNotResponding(
        f"the driver {answer.name}",
        f"its own socket, which the shim at {answer.backend} calls",
        f"it did not answer a Probe in {TIMEOUT_S:.0f} s",
        "start the driver, and read its log",
    )
