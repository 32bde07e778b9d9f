"""The only entry: `Service.answer` serves every call of a part, from a socket and from within the process.

It gives a call its fields and its span, admits it, runs its method, and records it. It answers an error of crust with
the error's sentence and code, and passes the status of a peer unchanged. Any other exception is a bug: it logs the
traceback, and the caller gets the request id only. So `except Exception` is right here: it catches unforeseen errors.
A caller gets an answer or `PeerStatus`.

An inner call is a call of this process for a call that it serves. It keeps that call's fields; its line is for DEBUG.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf import descriptor

import crust
from crust.core import errors, logs, metrics, traces
from crust.core.supervised import Health
from crust.host.answers import NotSeen
from crust.rpc import status, tracing
from crust.rpc.call import Call, fields_of, methods, parse
from crust.rpc.messages import csi, extensions, redaction
from crust.rpc.port import Port
from crust.rpc.status import PeerStatus

_log = logging.getLogger(__name__)

Unary = Callable[[Any, bytes, Call], Awaitable[bytes]]
"""A method of one answer: takes the request, the bytes of it, and the call."""
Stream = Callable[[Any, bytes, Call], AsyncGenerator[bytes, None]]


class Methods(NamedTuple):
    """The methods of a part, by their full names: of one answer, and with a stream of them."""

    unary: Mapping[str, Unary] = {}
    streams: Mapping[str, Stream] = {}


_UNKNOWN = "other"
"""The metric's label for unknown methods that pass: callers choose their names, and a metric keeps each label."""

QUIET = frozenset({"Probe", "GetPluginInfo", "GetPluginCapabilities", "NodeGetCapabilities"})
"""Called several times per operation by a kubelet: logged at DEBUG."""

POLLED = frozenset(
    f"{prefix}GetVolume{answer}"
    for prefix in ("Node", "Runtime", "")
    for answer in ("Stats", "Health")
)
"""Calls of each volume in each minute, by a kubelet and on to the runtime: logged at DEBUG unless they fail. One with
FAILED_PRECONDITION has not failed: the guest boots, or its runtime reports no statistics."""

_OPERATOR_SERVICES = ("/crust.v1.Inspect/", "/crust.v1.Pool/")
"""A call of an operator leaves no line in the log, and a Watch that its reader ends is no failure."""

_CODES = {code: code.name.title().replace("_", "") for code in grpc.StatusCode} | {
    grpc.StatusCode.OK: "OK",
    grpc.StatusCode.CANCELLED: "Canceled",
}
"""The names that a kubelet's metrics have for the codes."""

_NO_METHOD = (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
"""The status of gRPC itself for a method that a server does not have."""

_OURS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNKNOWN})
"""Failures of crust, or of the driver or handler behind it. All other codes but OK are refusals."""


def as_crust_error(rpc: str, server: str, error: Exception) -> errors.CrustError:
    """The error itself, or UnexpectedError for an unknown error, which is logged.

    `server` is the called part: a daemon of crust, or an author's driver or runtime on crust's code.
    """
    if isinstance(error, errors.CrustError):
        return error
    request_id = (logs.context.get() or {}).get("request_id", "")
    # the message has them too: the standard logging of an author's process shows no extra fields
    _log.error(
        "unexpected error in %s, request id %s", rpc, request_id, extra={"rpc": rpc}, exc_info=error
    )
    return errors.RuntimeFailed.named(
        "UnexpectedError",
        f"{rpc} failed",
        why=f"{server} raised an unexpected error",
        hint=f"the log of {server} has the reason under request id {request_id}",
    )


class Service:
    """The methods of one part, and the port that gets all `others`.

    Logs and errors show `name`; `driver` has the name of the CSI driver of these calls. `admit` raises an error for a
    method that cannot be served now; a Probe fails while the process is unhealthy.
    """

    def __init__(
        self,
        name: str,
        *methods: Methods,
        others: Port | None = None,
        health: Health | None = None,
        driver: Callable[[], str] = lambda: "",
        admit: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.health = health or Health()
        self.driver = driver
        self._unary = {key: method for part in methods for key, method in part.unary.items()}
        self._streams = {key: method for part in methods for key, method in part.streams.items()}
        self._others = others
        self._admit = admit

    def is_unary(self, method: str) -> bool:
        """Whether the method has one answer, as a known method that passes may."""
        rpc = methods().get(method) if self._others is not None else None
        passes = rpc is not None and not (rpc.client_streaming or rpc.server_streaming)
        return method in self._unary or passes

    def streams(self, method: str) -> bool:
        """Whether the method may have a stream of answers, as an unknown method that passes may."""
        return method in self._streams or self._others is not None

    async def answer(self, call: Call, data: bytes, *, is_inner: bool = False) -> bytes:
        """The answer to a request. Raises `PeerStatus`, and `CancelledError` when the caller has gone away."""
        outer = logs.context.get()
        served = _Served(self, call, data, is_inner=is_inner)
        has_span = traces.tracer is not None and not served.is_quiet
        try:
            with tracing.served(call, self.name) if has_span else contextlib.nullcontext():
                try:
                    if served.rpc == "Probe":
                        self.health.check_healthy()
                    self._admit(call.method)
                    method = self._unary.get(call.method)
                    if method is not None:
                        answer = await method(
                            served.request or parse(call.method, data), data, call
                        )
                    elif self._others is not None:
                        answer = await self._others.forward(call, data)
                    else:
                        raise PeerStatus(*_NO_METHOD)
                except (Exception, asyncio.CancelledError) as error:
                    served.refuse(error)
                served.end()
                return answer
        finally:
            # A caller that serves no call itself, e.g. work in the background, must have no fields afterwards: the
            # log, and a handler, would take its next call for this one.
            logs.context.set(outer)

    async def stream(
        self, call: Call, data: bytes, *, is_inner: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """The answers to a request; raises as `answer`. Its reader keeps the fields of the call apart."""
        served = _Served(self, call, data, is_inner=is_inner)
        try:
            self._admit(call.method)
            method = self._streams.get(call.method)
            if method is not None:
                stream = method(served.request or parse(call.method, data), data, call)
            elif self._others is not None:
                stream = self._others.stream(call, data)
            else:
                raise PeerStatus(*_NO_METHOD)
            async with contextlib.aclosing(stream) as answers:
                async for answer in answers:
                    yield answer
        except (Exception, asyncio.CancelledError) as error:
            served.refuse(error)
        served.end()


class _Served:
    """A served call: sets its fields, and counts and logs it when it ends; an inner call is only logged, at DEBUG."""

    def __init__(self, service: Service, call: Call, data: bytes, *, is_inner: bool) -> None:
        self._service = service
        self._call = call
        self._is_inner = is_inner
        self._began_s = time.monotonic()
        self.rpc = call.method.rpartition("/")[2]
        self._is_look = call.method.startswith(_OPERATOR_SERVICES)
        self.is_quiet = self._is_look or self.rpc in QUIET
        self.request: Any = None
        # it may pass, and its driver refuses it
        with contextlib.suppress(errors.InvalidRequest):
            self.request = parse(call.method, data)
        if not is_inner or logs.context.get() is None:
            logs.context.set(fields_of(self.request, service.driver(), call.metadata))

    def end(
        self, code: grpc.StatusCode = grpc.StatusCode.OK, error: errors.CrustError | None = None
    ) -> None:
        elapsed_s = time.monotonic() - self._began_s
        method = self._call.method
        if not self._is_inner and method.startswith("/csi."):
            driver = self._service.driver() or metrics.UNKNOWN_DRIVER
            labels = (driver, method if method in methods() else _UNKNOWN, _CODES[code])
            metrics.csi_operations.labels(*labels, "false").observe(elapsed_s)
            if error is not None and error.error_name == NotSeen.__name__:  # also a peer's
                metrics.calls_unseen.inc()
        is_fine = code is grpc.StatusCode.OK or (
            self._is_look and code is grpc.StatusCode.CANCELLED
        )
        is_polled = self.is_quiet or self.rpc in POLLED
        level = logging.DEBUG if self._is_inner or is_polled else logging.INFO
        is_fine |= self.rpc in POLLED and code is grpc.StatusCode.FAILED_PRECONDITION
        # a refusal is a warning; the outer call reports an inner call's failure
        if not (self._is_inner or is_fine):
            level = logging.ERROR if code in _OURS else logging.WARNING
        if not _log.isEnabledFor(level):
            return
        extra: dict[str, Any] = {
            "rpc": self.rpc,
            "server": self._service.name,
            "code": code.name,
            "ms": round(elapsed_s * 1000, 1),
        }
        if error is not None:
            text, name = str(error), error.error_name
            if isinstance(error, PeerStatus):
                text, name = error.text, status.name_in(error.trailing)
            extra["error"] = redaction.without_secrets(text, self.request)
            if name:
                extra["error_name"] = name
        if _log.isEnabledFor(logging.DEBUG):
            extra["request"] = self.request and redaction.describe(self.request)
        _log.log(level, "served", extra=extra)

    def refuse(self, error: BaseException) -> NoReturn:
        """Record a call that failed, and raise its status; the cancellation itself if the caller has gone away.

        If only a task that the method awaited was cancelled, the caller gets an answer: gRPC sends none when a method
        ends with CancelledError, and the caller would wait until its deadline.
        """
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                self.end(grpc.StatusCode.CANCELLED)
                raise error
            error = errors.PeerUnavailable(
                f"{self.rpc} was interrupted",
                why="a task that it waited for was cancelled",
                hint="retry",
            )
        assert isinstance(error, Exception)
        answered = as_crust_error(self.rpc, self._service.name, error)
        refusal = status.of(answered, self._call)
        self.end(refusal.code, answered)
        if refusal is error:  # an error must not be its own cause
            raise refusal
        raise refusal from error


def methods_of(servicer: object, service: descriptor.ServiceDescriptor) -> Methods:
    """The methods of a servicer; each takes a message and its `Call`, and answers a message, or an iterator.

    A method that the servicer lacks answers `RpcNotServed`. Here crust limits the secrets of a request.
    """
    unary: dict[str, Unary] = {}
    streams: dict[str, Stream] = {}
    for method in service.methods:
        name = f"/{service.full_name}/{method.name}"
        served = getattr(servicer, method.name, None)
        if served is not None and method.server_streaming:
            streams[name] = partial(_stream, served)
        else:
            unary[name] = partial(_unary, served)
    return Methods(unary, streams)


def csi_methods(service: str, methods: Mapping[str, Unary]) -> Methods:
    """Methods of a CSI service that read the request and may pass its bytes on, by their names."""
    return Methods({f"/csi.v1.{service}/{name}": answer for name, answer in methods.items()})


def probe(backend: Port, version: str) -> Methods:
    """A Probe that passes, and adds this process's version to its trailing metadata if the caller opts in.

    `version` is the metadata's key. The driver's answer stays unchanged: GetPluginInfo is about the driver.
    """

    async def passed(_: object, data: bytes, call: Call) -> bytes:
        answer = await backend.forward(call, data)
        if extensions.requested(call.metadata, extensions.VERSIONS):
            call.trailing = (*call.trailing, (version, crust.__version__))
        return answer

    return Methods({"/csi.v1.Identity/Probe": passed})


async def _unary(
    served: Callable[[Any, Call], Awaitable[Any]] | None, request: Any, _: bytes, call: Call
) -> bytes:
    if served is None:
        raise errors.Unsupported.named(
            "RpcNotServed",
            f"{call.method.rpartition('/')[2]} is not served here",
            why="its capability is not advertised",
        )
    csi.check_context(getattr(request, "secrets", {}), "secrets")
    encoded: bytes = (await served(request, call)).SerializeToString()
    return encoded


async def _stream(
    served: Callable[[Any, Call], AsyncGenerator[Any, None]], request: Any, _: bytes, call: Call
) -> AsyncGenerator[bytes, None]:
    csi.check_context(getattr(request, "secrets", {}), "secrets")
    async with contextlib.aclosing(served(request, call)) as messages:
        async for message in messages:
            yield message.SerializeToString()
