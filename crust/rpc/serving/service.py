"""The one way in: `Service.answer` serves every call of a part, from a socket and from within the process.

A call gets its fields and its span, is admitted, runs its method, and is recorded. An error of crust is answered with
its own sentence and code, the status of a peer unchanged. Any other exception is a bug: it is logged with its
traceback, and the caller gets the request id only. So `except Exception` is right here: it means every error that
nobody has thought of. A caller gets an answer or `PeerStatus`, and nothing else.

An inner call is made by this process for a call that it got. It keeps that call's fields, and is logged at DEBUG.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf import descriptor

from crust.core import errors, logs, metrics, traces
from crust.core.supervised import Health
from crust.rpc import status, tracing
from crust.rpc.call import Call, fields_of, is_unary, methods, parse
from crust.rpc.messages import csi, redaction
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
"""The metric's label for unknown methods that pass: callers choose their names, and a metric keeps them."""

QUIET = frozenset({"Probe", "GetPluginInfo", "GetPluginCapabilities", "NodeGetCapabilities"})
"""Called several times per operation by a kubelet: logged at DEBUG."""

_OF_OPERATORS = ("/crust.v1.Inspect/", "/crust.v1.Pool/")
"""An operator who looks leaves no line in the log, and a Watch that its reader ends is no failure."""

_CODES = {code: code.name.title().replace("_", "") for code in grpc.StatusCode} | {
    grpc.StatusCode.OK: "OK",
    grpc.StatusCode.CANCELLED: "Canceled",
}
"""The names that a kubelet's metrics have for the codes."""

_OURS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNKNOWN})
"""Failures of crust, or of the driver or handler behind it. All other codes but OK are refusals."""


def known_error(rpc: str, server: str, error: Exception) -> errors.CrustError:
    """The error itself, or UnexpectedError in the place of one that crust does not know, which is logged.

    `server` is the part that was called: a daemon of crust, or an author's driver or runtime that is served with
    crust's code.
    """
    if isinstance(error, errors.CrustError):
        return error
    request_id = (logs.context.get() or {}).get("request_id", "")
    # in the message, too: a process of an author has the standard logging, which shows no extra fields
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
    """The methods of one part, and the port that gets all others.

    `name` is the part's in logs and errors, `driver` has the name of the CSI driver whose calls these are. `admit`
    raises why a method cannot be served now; a Probe is refused while the process is unhealthy.
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
        self._unary = {key: each for part in methods for key, each in part.unary.items()}
        self._streams = {key: each for part in methods for key, each in part.streams.items()}
        self._others = others
        self._admit = admit

    def is_unary(self, method: str) -> bool:
        """Whether the method is known to have one answer."""
        passes = self._others is not None and is_unary(method)
        return method in self._unary or passes

    def streams(self, method: str) -> bool:
        """Whether the method may have a stream of answers. One that passes may have, unless it is known."""
        return method in self._streams or self._others is not None

    async def answer(self, call: Call, data: bytes, *, is_inner: bool = False) -> bytes:
        """The answer to a request. Raises `PeerStatus`, and `CancelledError` when the caller has gone away."""
        around = logs.context.get()
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
                        raise _no_method()
                except (Exception, asyncio.CancelledError) as error:
                    served.refuse(error)
                served.end()
                return answer
        finally:
            # A caller that serves no call itself, e.g. work in the background, has no fields after it either: its
            # next call would be logged, and named to a handler, as this one.
            logs.context.set(around)

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
                raise _no_method()
            async with contextlib.aclosing(stream) as answers:
                async for answer in answers:
                    yield answer
        except (Exception, asyncio.CancelledError) as error:
            served.refuse(error)
        served.end()


class _Served:
    """A call that `service` serves: has its fields from now on, and is counted and logged when it ends.

    An inner call is made by this process for a call that it got: its line is for DEBUG, and it is not counted.
    """

    def __init__(self, service: Service, call: Call, data: bytes, *, is_inner: bool) -> None:
        self._service = service
        self._call = call
        self._is_inner = is_inner
        self._began_s = time.monotonic()
        self.rpc = call.method.rpartition("/")[2]
        self._is_look = call.method.startswith(_OF_OPERATORS)
        self.is_quiet = self._is_look or self.rpc in QUIET
        self.request: Any = None
        # it may pass, and is the other's to refuse
        with contextlib.suppress(errors.InvalidRequest):
            self.request = parse(call.method, data)
        if not is_inner or logs.context.get() is None:
            logs.context.set(fields_of(self.request, service.driver(), call.metadata))

    def end(
        self,
        code: grpc.StatusCode = grpc.StatusCode.OK,
        error: errors.CrustError | None = None,
    ) -> None:
        """Count and log the call."""
        elapsed_s = time.monotonic() - self._began_s
        method = self._call.method
        if not self._is_inner and method.startswith("/csi."):
            driver = self._service.driver() or metrics.UNKNOWN_DRIVER
            labels = (driver, method if method in methods() else _UNKNOWN, _CODES[code])
            metrics.csi_operations.labels(*labels, "false").observe(elapsed_s)
        is_fine = code is grpc.StatusCode.OK or (
            self._is_look and code is grpc.StatusCode.CANCELLED
        )
        level = logging.DEBUG if self._is_inner or self.is_quiet else logging.INFO
        # a refusal is a warning; an inner call's failure is the outer one's, too
        if not (self._is_inner or is_fine):
            level = logging.ERROR if code in _OURS else logging.WARNING
        if _log.isEnabledFor(level):
            self._log(level, elapsed_s, code, error)

    def _log(
        self,
        level: int,
        elapsed_s: float,
        code: grpc.StatusCode,
        error: errors.CrustError | None,
    ) -> None:
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

        Where only something that the method awaited was cancelled, the caller is answered: gRPC answers nothing when
        a method ends with CancelledError, and the caller would wait until its deadline.
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
        answered = known_error(self.rpc, self._service.name, error)
        refusal = status.of(answered, self._call)
        self.end(refusal.code, answered)
        if refusal is error:  # an error must not be its own cause
            raise refusal
        raise refusal from error


def _no_method() -> PeerStatus:
    """The status for a method that a part does not have, in gRPC's words."""
    return PeerStatus(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def methods_of(servicer: object, service: descriptor.ServiceDescriptor) -> Methods:
    """The methods of a servicer, each of which takes a message and its `Call`, and answers a message, or an iterator.

    A method that the servicer lacks answers `RpcNotServed`. The secrets of a request are limited here.
    """
    unary: dict[str, Unary] = {}
    streams: dict[str, Stream] = {}
    for method in service.methods:
        name = f"/{service.full_name}/{method.name}"
        served = getattr(servicer, method.name, None)
        if served is None:
            unary[name] = _not_served
        elif method.server_streaming:
            streams[name] = _stream(served)
        else:
            unary[name] = _unary(served)
    return Methods(unary, streams)


def looking_at(service: str, methods: Mapping[str, Unary]) -> Methods:
    """Methods of a service of CSI that look at their request, and may pass on the bytes of it, by their names."""
    return Methods({f"/csi.v1.{service}/{name}": answer for name, answer in methods.items()})


def _unary(served: Callable[[Any, Call], Awaitable[Any]]) -> Unary:
    async def answer(request: Any, _: bytes, call: Call) -> bytes:
        csi.check_secrets(request)
        encoded: bytes = (await served(request, call)).SerializeToString()
        return encoded

    return answer


def _stream(served: Callable[[Any, Call], AsyncGenerator[Any, None]]) -> Stream:
    async def answers(request: Any, _: bytes, call: Call) -> AsyncGenerator[bytes, None]:
        csi.check_secrets(request)
        async with contextlib.aclosing(served(request, call)) as messages:
            async for message in messages:
                yield message.SerializeToString()

    return answers


async def _not_served(_: Any, __: bytes, call: Call) -> bytes:
    raise errors.Unsupported.named(
        "RpcNotServed",
        f"{call.method.rpartition('/')[2]} is not served here",
        why="its capability is not advertised",
    )
