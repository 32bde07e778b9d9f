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
from google.protobuf import descriptor, message_factory

from crust.core import errors, logs, metrics, traces
from crust.core.supervised import Health
from crust.rpc import status, tracing
from crust.rpc.call import Call, CallFields, current_fields
from crust.rpc.messages import redaction, requests
from crust.rpc.port import Port
from crust.rpc.status import PeerStatus

_log = logging.getLogger(__name__)

Unary = Callable[[Call, bytes], Awaitable[bytes]]
Stream = Callable[[Call, bytes], AsyncGenerator[bytes, None]]


class Methods(NamedTuple):
    """The methods of a part, by their full names, from bytes to bytes: of one answer, and with a stream of them."""

    unary: Mapping[str, Unary] = {}
    streams: Mapping[str, Stream] = {}


_UNKNOWN = "other"
"""The metric's label for unknown methods that pass."""

QUIET = frozenset({"Probe", "GetPluginInfo", "GetPluginCapabilities", "NodeGetCapabilities"})
"""Called several times per operation by a kubelet: logged at DEBUG."""

_OF_OPERATORS = ("/crust.v1.Inspect/", "/crust.v1.Pool/")
"""An operator who looks leaves no line in the log, and a Watch that its reader ends is no failure."""

_CODES = {code: code.name.title().replace("_", "") for code in grpc.StatusCode} | {
    grpc.StatusCode.OK: "OK",
    grpc.StatusCode.CANCELLED: "Canceled",
}
"""The names that a kubelet's metrics have for the codes."""

_FINE = frozenset({grpc.StatusCode.OK})
_OURS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNKNOWN})
"""Failures of crust, or of the driver or handler behind it. All other codes but OK are refusals."""


def known_error(rpc: str, server: str, error: Exception) -> errors.CrustError:
    """The error itself, or UnexpectedError in the place of one that crust does not know, which is logged.

    `server` is the part that was called: a daemon of crust, or an author's driver or runtime that is served with
    crust's code.
    """
    if isinstance(error, errors.CrustError):
        return error
    fields = current_fields()
    request_id = fields.request_id if fields else ""
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


class _Record:
    """Counts and logs the calls of one method of the part `server`; `driver` has the CSI driver whose calls they are.

    An inner call is made by this process for a call that it got: its line is for DEBUG, and it is not counted.
    """

    def __init__(
        self, server: str, driver: Callable[[], str], method: str, *, is_inner: bool
    ) -> None:
        self._server = server
        self._driver = driver
        self._is_inner = is_inner
        self.rpc = method.rpartition("/")[2]
        is_look = method.startswith(_OF_OPERATORS)
        self.is_quiet = is_look or self.rpc in QUIET
        self._fine = _FINE | {grpc.StatusCode.CANCELLED} if is_look else _FINE
        self._method = method
        self._is_csi = method.startswith("/csi.")
        # the caller chooses the name of an unknown method that passes, and a metric would keep that name for good
        self._counted_as = method if requests.is_known(method) else _UNKNOWN
        self._level = logging.DEBUG if is_inner or self.is_quiet else logging.INFO

    def record(
        self,
        request: bytes,
        started_s: float,
        code: grpc.StatusCode = grpc.StatusCode.OK,
        error: Mapping[str, str] | None = None,
    ) -> None:
        """Count and log a call that has ended; `error` has the log fields of a failure."""
        elapsed_s = time.monotonic() - started_s
        if self._is_csi and not self._is_inner:
            driver = self._driver() or metrics.UNKNOWN_DRIVER
            labels = (driver, self._counted_as, _CODES[code], "false")
            metrics.csi_operations.labels(*labels).observe(elapsed_s)
        level = self._level
        # a refusal is a warning; an inner call's failure is the outer one's, too
        if not (self._is_inner or code in self._fine):
            level = logging.ERROR if code in _OURS else logging.WARNING
        if _log.isEnabledFor(level):
            self._log_served(level, request, elapsed_s, code, error or {})

    def _log_served(
        self,
        level: int,
        request: bytes,
        elapsed_s: float,
        code: grpc.StatusCode,
        error: Mapping[str, str],
    ) -> None:
        extra: dict[str, Any] = {
            "rpc": self.rpc,
            "server": self._server,
            "code": code.name,
            "ms": round(elapsed_s * 1000, 1),
            **error,
        }
        if "error" in extra:
            extra["error"] = redaction.without_secrets(extra["error"], self._method, request)
        if _log.isEnabledFor(logging.DEBUG):
            message = requests.decoded(self._method, request)
            extra["request"] = None if message is None else redaction.describe(message)
        _log.log(level, "served", extra=extra)


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
        self._records: dict[tuple[str, bool], _Record] = {}

    def is_unary(self, method: str) -> bool:
        """Whether the method is known to have one answer."""
        passes = self._others is not None and requests.is_unary(method)
        return method in self._unary or passes

    def streams(self, method: str) -> bool:
        """Whether the method may have a stream of answers. One that passes may have, unless it is known."""
        return method in self._streams or self._others is not None

    async def answer(self, call: Call, data: bytes, *, is_inner: bool = False) -> bytes:
        """The answer to a request. Raises `PeerStatus`, and `CancelledError` when the caller has gone away."""
        record = self._record(call.method, is_inner)
        around, started_s = self._begin(call, data, is_inner=is_inner), time.monotonic()
        has_span = traces.tracer is not None and not record.is_quiet
        try:
            with tracing.served(call, self.name) if has_span else contextlib.nullcontext():
                try:
                    if call.method.endswith("/Probe"):
                        self.health.check_healthy()
                    self._admit(call.method)
                    method = self._unary.get(call.method)
                    if method is not None:
                        answer = await method(call, data)
                    elif self._others is not None:
                        answer = await self._others.forward(call, data)
                    else:
                        raise _no_method()
                except (Exception, asyncio.CancelledError) as error:
                    self._refuse(call, data, record, started_s, error)
                record.record(data, started_s)
                return answer
        finally:
            # A caller that serves no call itself, e.g. work in the background, has no fields after it either: its
            # next call would be logged, and named to a handler, as this one.
            logs.context.set(around)

    async def stream(
        self, call: Call, data: bytes, *, is_inner: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """The answers to a request; raises as `answer`. Its reader keeps the fields of the call apart."""
        record, started_s = self._record(call.method, is_inner), time.monotonic()
        self._begin(call, data, is_inner=is_inner)
        try:
            self._admit(call.method)
            async with contextlib.aclosing(self._answers(call, data)) as answers:
                async for answer in answers:
                    yield answer
        except (Exception, asyncio.CancelledError) as error:
            self._refuse(call, data, record, started_s, error)
        record.record(data, started_s)

    def _begin(self, call: Call, data: bytes, *, is_inner: bool) -> Mapping[str, str] | None:
        around = logs.context.get()
        call.request = None  # an inner call may be the outer one, with another request
        if not is_inner or current_fields() is None:
            call.request = requests.decoded(call.method, data)
            metadata = call.metadata
            logs.context.set(CallFields(call.request, self.driver(), metadata))
        return around

    def _answers(self, call: Call, data: bytes) -> AsyncGenerator[bytes, None]:
        method = self._streams.get(call.method)
        if method is not None:
            return method(call, data)
        if self._others is None:
            raise _no_method()
        return self._others.stream(call, data)

    def _record(self, method: str, is_inner: bool) -> _Record:  # noqa: FBT001
        record = self._records.get((method, is_inner))
        if record is None:
            record = _Record(self.name, self.driver, method, is_inner=is_inner)
            if self.is_unary(method):  # callers choose other names, without a bound
                self._records[method, is_inner] = record
        return record

    def _refuse(
        self, call: Call, data: bytes, record: _Record, started_s: float, error: BaseException
    ) -> NoReturn:
        """Record a call that failed, and raise its status; the cancellation itself if the caller has gone away.

        Where only something that the method awaited was cancelled, the caller is answered: gRPC answers nothing when
        a method ends with CancelledError, and the caller would wait until its deadline.
        """
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                record.record(data, started_s, grpc.StatusCode.CANCELLED)
                raise error
            error = errors.PeerUnavailable(
                f"{record.rpc} was interrupted",
                why="a task that it waited for was cancelled",
                hint="retry",
            )
        assert isinstance(error, Exception)
        answered = known_error(record.rpc, self.name, error)
        refusal = status.of(answered, call)
        record.record(data, started_s, refusal.code, _logged(answered))
        if refusal is error:  # an error must not be its own cause
            raise refusal
        raise refusal from error


def _logged(error: errors.CrustError) -> dict[str, str]:
    """The log fields of an error; the status of a peer has a name only if it is an error of crust."""
    if not isinstance(error, PeerStatus):
        return {"error": str(error), "error_name": error.error_name}
    is_named = status.name_in(error.trailing)
    return {"error": error.text, **({"error_name": error.error_name} if is_named else {})}


def _no_method() -> PeerStatus:
    """The status for a method that a part does not have, in gRPC's words."""
    return PeerStatus(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def methods_of(servicer: object, service: descriptor.ServiceDescriptor) -> Methods:
    """The methods of a servicer, each of which takes a message and its `Call`, and answers a message, or an iterator.

    A method that the servicer lacks answers `RpcNotServed`. A request is decoded, and its secrets are limited, here.
    """
    unary: dict[str, Unary] = {}
    streams: dict[str, Stream] = {}
    for method in service.methods:
        name = f"/{service.full_name}/{method.name}"
        served = getattr(servicer, method.name, None)
        kind = message_factory.GetMessageClass(method.input_type)
        if served is None:
            unary[name] = _not_served
        elif method.server_streaming:
            streams[name] = _stream(kind, served)
        else:
            unary[name] = _unary(kind, served)
    return Methods(unary, streams)


def looking_at(
    service: str, methods: Mapping[str, Callable[[Any, bytes, Call], Awaitable[bytes]]]
) -> Methods:
    """Methods of a service of CSI that look at their request, and may pass on the bytes of it, by their names."""

    def looking(name: str, answer: Callable[[Any, bytes, Call], Awaitable[bytes]]) -> Unary:
        kind = requests.kind_of(name)

        async def behave(call: Call, data: bytes) -> bytes:
            return await answer(call.request or requests.parse(kind, data), data, call)

        return behave

    full = {f"/csi.v1.{service}/{name}": answer for name, answer in methods.items()}
    return Methods({name: looking(name, answer) for name, answer in full.items()})


def _unary(kind: Any, served: Callable[[Any, Call], Awaitable[Any]]) -> Unary:
    async def answer(call: Call, data: bytes) -> bytes:
        request = call.request or requests.parse(kind, data)
        requests.check_secrets(request)
        encoded: bytes = (await served(request, call)).SerializeToString()
        return encoded

    return answer


def _stream(kind: Any, served: Callable[[Any, Call], AsyncGenerator[Any, None]]) -> Stream:
    async def answers(call: Call, data: bytes) -> AsyncGenerator[bytes, None]:
        request = requests.parse(kind, data)
        requests.check_secrets(request)
        async with contextlib.aclosing(served(request, call)) as each:
            async for answer in each:
                yield answer.SerializeToString()

    return answers


async def _not_served(call: Call, _: bytes) -> bytes:
    raise errors.Unsupported.named(
        "RpcNotServed",
        f"{call.method.rpartition('/')[2]} is not served here",
        why="its capability is not advertised",
    )
