"""The interceptor of every server: it maps errors to statuses, gives each call an id and one log line, limits
secrets.

Without it, grpc.aio would send the text of any exception to the peer as UNKNOWN. An error of crust is answered with
its own sentence and code. Any other exception is a bug: it is logged with its traceback, and the peer gets the
request id only. So `except Exception` is right here: what it names is whatever nobody has thought of.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio

from crust import errors, logs, traces
from crust.rpc import status, tracing
from crust.rpc.messages import call_fields, limits
from crust.rpc.serving.call_record import QUIET, CallRecord, Served
from crust.rpc.serving.health import Health
from crust.rpc.serving.method_handlers import WrappedHandlers

_log = logging.getLogger(__name__)

_UNKNOWN = "other"
"""The metric's label for unknown pass-through methods."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stubs only
Context = grpc.aio.ServicerContext[Any, Any]


class UnexpectedError(errors.RuntimeFailed):
    """A bug: an exception that crust does not know. The log of the process has its traceback under the request id.

    `server` is the part that was called: a daemon of crust, or an author's driver or runtime that is served with
    crust's code.
    """

    def __init__(self, rpc: str, server: str, request_id: str) -> None:
        super().__init__(
            f"{rpc} failed",
            why=f"{server} raised an unexpected error",
            hint=f"the log of {server} has the reason under request id {request_id}",
        )


def known(rpc: str, server: str, error: Exception) -> errors.CrustError:
    """The error itself, or an `UnexpectedError` in the place of one that crust does not know, which is logged."""
    return error if isinstance(error, errors.CrustError) else _unexpected(rpc, server, error)


def _unexpected(rpc: str, server: str, error: Exception) -> UnexpectedError:
    fields = call_fields.current()
    request_id = fields.request_id if fields else ""
    # in the message, too: a process of an author has the standard logging, which shows no extra fields
    _log.error(
        "unexpected error in %s, request id %s", rpc, request_id, extra={"rpc": rpc}, exc_info=error
    )
    return UnexpectedError(rpc, server, request_id)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Maps errors, and identifies, logs and counts calls; refuses a Probe while the process is unhealthy.

    `admit` raises why a method cannot be served now. An inner call is made by this process for a call that it got: it
    has that call's fields, and its line is for DEBUG.
    """

    def __init__(
        self,
        served: Served,
        health: Health,
        admit: Callable[[str], None] | None = None,
        *,
        is_inner: bool = False,
    ) -> None:
        self._served = served
        self._health = health
        self._admit = admit
        self._is_inner = is_inner
        self._wrapped = WrappedHandlers(self._wrap)

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Wrap the method's handler; an unknown method stays unknown."""
        handler = await continuation(handler_call_details)
        return self._wrapped.of(handler_call_details.method, handler)

    def _wrap(self, method: str, handler: Handler) -> Handler:
        # an unknown pass-through method: the caller chooses its name, and a metric would keep that name for good
        counted_as = "" if call_fields.is_known(method) else _UNKNOWN
        call = _Call(self._served, method, counted_as, self._admit, is_inner=self._is_inner)
        if handler.unary_unary is not None:
            is_probe = call.name == "Probe"
            behaviour = self._healthy(handler.unary_unary) if is_probe else handler.unary_unary
            return grpc.unary_unary_rpc_method_handler(
                call.unary(behaviour), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                call.streaming(handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        raise errors.Unsupported(f"{call.name} takes a stream of requests")

    def _healthy(self, behaviour: Callable[..., Any]) -> Callable[[Any, Context], Awaitable[Any]]:
        """Run the behaviour if the process is healthy; else FAILED_PRECONDITION with the problem (CSI Probe)."""

        async def probe(request: Any, context: Context) -> Any:
            self._health.check()
            return await behaviour(request, context)

        return probe


class _Call:
    def __init__(
        self,
        served: Served,
        method: str,
        counted_as: str,
        admit: Callable[[str], None] | None = None,
        *,
        is_inner: bool = False,
    ) -> None:
        self._served = served
        self._admit = admit
        self._is_inner = is_inner
        self.name = method.rpartition("/")[2]
        self._method = method
        self._is_csi = method.startswith("/csi.")
        self._record = CallRecord(served, method, counted_as, is_inner=is_inner)

    def unary(self, behaviour: Callable[..., Any]) -> Callable[[Any, Context], Awaitable[Any]]:
        async def handle(request: Any, context: Context) -> Any:
            started_s = self._begin(request, context)
            try:
                self._check(request)
                response = await behaviour(request, context)
            except errors.CrustError as error:
                await self._answer(context, request, started_s, error)
            except Exception as error:
                await self._answer_bug(context, request, started_s, error)
            except asyncio.CancelledError:
                await self._answer_cancelled(context, request, started_s)
            self._record.soon(request, started_s)
            return response

        if traces.tracer is None or self.name in QUIET:
            return handle
        return tracing.unary(self._method, self._served.name, handle)

    def streaming(
        self, behaviour: Callable[..., Any]
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def handle(request: Any, context: Context) -> AsyncIterator[Any]:
            started_s = self._begin(request, context)
            try:
                self._check(request)
                async for response in behaviour(request, context):
                    yield response
            except errors.CrustError as error:
                await self._answer(context, request, started_s, error)
            except Exception as error:
                await self._answer_bug(context, request, started_s, error)
            except asyncio.CancelledError:
                await self._answer_cancelled(context, request, started_s)
            self._record.soon(request, started_s)

        return handle

    def _check(self, request: Any) -> None:
        limits.check_secrets(request)
        if self._admit is not None:
            self._admit(self._method)

    def _begin(self, request: Any, context: Context) -> float:
        # not by its truth: that is its length, which reads the request at once
        if not self._is_inner or call_fields.current() is None:
            fields = call_fields.CallFields(
                self._method, request, self._served.driver, context.invocation_metadata()
            )
            logs.context.set(fields)
        return time.monotonic()

    async def _answer(
        self, context: Context, request: Any, started_s: float, error: errors.CrustError
    ) -> NoReturn:
        self._record.now(request, started_s, status.code_of(error), _logged(error))
        await status.abort(context, error, is_csi=self._is_csi)

    async def _answer_bug(
        self, context: Context, request: Any, started_s: float, error: Exception
    ) -> NoReturn:
        if isinstance(error, NotImplementedError):  # the generated base of a servicer
            await self._answer(
                context,
                request,
                started_s,
                errors.Unsupported.named(
                    "RpcNotServed",
                    f"{self.name} is not served here",
                    why="its capability is not advertised",
                ),
            )
        if isinstance(error, grpc.aio.AbortError):  # the behaviour has answered already
            self._record.now(request, started_s, status.of_context(context), _peer_error(context))
            raise error
        bug = _unexpected(self.name, self._served.name, error)
        await self._answer(context, request, started_s, bug)

    async def _answer_cancelled(self, context: Context, request: Any, started_s: float) -> NoReturn:
        """Either the caller has cancelled; or only something that the handler awaited was cancelled: then answer.

        grpc.aio answers nothing if a handler raises CancelledError by itself: the caller would wait until its
        deadline.
        """
        task = asyncio.current_task()
        if task is None or task.cancelling():
            self._record.now(request, started_s, grpc.StatusCode.CANCELLED, {})
            raise asyncio.CancelledError
        lost = errors.PeerUnavailable(
            f"{self.name} was interrupted",
            why="a task that it waited for was cancelled",
            hint="retry",
        )
        await self._answer(context, request, started_s, lost)


def _logged(error: errors.CrustError) -> dict[str, str]:
    """The log fields of an error; the status of a peer has a name only if it is an error of crust."""
    if not isinstance(error, status.PeerStatus):
        return {"error": str(error), "error_name": error.error_name}
    is_named = status.name_in(error.trailing)
    return {"error": error.text, **({"error_name": error.error_name} if is_named else {})}


def _peer_error(context: Context) -> dict[str, str]:
    """The log fields of a status that was passed through; only crust's errors have a name."""
    name = status.name_in(context.trailing_metadata())
    return {"error": context.details(), **({"error_name": name} if name else {})}
