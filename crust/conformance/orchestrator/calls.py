"""Calls of a CO; each answer is checked for what holds for all answers, and the last exchange is kept for the report.

The one sleep of the suite is here: a CO that is answered ABORTED has nothing to wait on, and asks again after a
while, longer each time, as kubelets and sidecars do.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from crust.conformance.orchestrator import exchange
from crust.rpc.messages import redaction
from crust.wire.csi.v1 import csi_pb2

Request = TypeVar("Request", bound=Message)
Answer = TypeVar("Answer", bound=Message)
Code = grpc.StatusCode

# The codes after which a CO retries, since the call may still succeed (csi-and-kubelet: "non-final").
PENDING = (Code.ABORTED, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED)
_RETRY_FIRST_S = 0.02
_RETRY_MOST_S = 0.5
STRING_MAX_BYTES = 128
MAP_MAX_BYTES = 4096
_OTHER_LIMITS = {"csi.v1.NodeGetInfoResponse.node_id": 256}
_EXTENSIONS = ("csi.v1.DeferredMount",)
"""Not of the specification: its paths and options have limits of their own."""
_DETAILS = "grpc-status-details-bin"


class Refusal(AssertionError):
    """A call that had to be answered OK was not."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Calls:
    """Sends requests. `timeout_s` is each call's deadline, and how long a retried call is retried."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last: Callable[[], exchange.Exchange] = lambda: exchange.NONE

    @property
    def last(self) -> exchange.Exchange:
        """The last call, as a report shows it; made into text only where something is broken."""
        return self._last()

    def ask(
        self, method: "grpc.UnaryUnaryMultiCallable[Request, Answer]", request: Request
    ) -> Answer:
        """A call that must be answered OK, within the size limits. Raises AssertionError."""
        try:
            answer = method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise self._refusal(request, "was answered", error) from None
        return self._checked(request, answer)

    def refused(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Answer]",
        request: Request,
        *codes: grpc.StatusCode,
    ) -> str:
        """A call that must be refused with one of `codes`; returns the message. Raises AssertionError."""
        code, message = self.outcome(method, request)
        name, wanted = type(request).__name__, " or ".join(each.name for each in codes)
        assert code in codes, f"{name} was answered {code.name}, must be {wanted}"
        return message

    def reply(
        self, method: "grpc.UnaryUnaryMultiCallable[Request, Answer]", request: Request
    ) -> Answer | Refusal:
        """The answer of a call that a driver may refuse, or the refusal, whose code the case judges."""
        try:
            answer = method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            self._refused(request, error)
            return self._refusal(request, "was answered", error)
        return self._checked(request, answer)

    def outcome(
        self, method: "grpc.UnaryUnaryMultiCallable[Request, Answer]", request: Request
    ) -> tuple[grpc.StatusCode, str]:
        """A call that may be answered or refused; returns the code and the message."""
        try:
            answer = method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            return self._refused(request, error)
        self._checked(request, answer)
        return Code.OK, ""

    def concurrently(
        self,
        calls: Sequence[tuple["grpc.UnaryUnaryMultiCallable[Request, Answer]", Request]],
    ) -> list[Answer | grpc.StatusCode]:
        """All calls at once, each answered or refused; answers in the order of `calls`."""
        futures = [method.future(request, timeout=self._timeout_s) for method, request in calls]
        found = [_settled(each) for each in futures]
        codes = [each.name if isinstance(each, Code) else Code.OK.name for each in found]
        shown, times = ", ".join(codes), len(calls)
        self._last = lambda: exchange.of(calls[0][1], shown, "", times=times)
        return found

    def abandoned(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Answer]",
        request: Request,
        after_s: float,
    ) -> None:
        """A call that is cancelled after `after_s`; its result does not matter."""
        _settled(method.future(request, timeout=after_s))

    def until_final(
        self, method: "grpc.UnaryUnaryMultiCallable[Request, Answer]", request: Request
    ) -> Answer:
        """A call that is sent again until its code is final, as a CO does. Raises AssertionError."""
        until, pause_s = time.monotonic() + self._timeout_s, _RETRY_FIRST_S
        while True:
            try:
                answer = method(request, timeout=self._timeout_s, wait_for_ready=True)
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call)
                if error.code() not in PENDING or time.monotonic() > until:
                    raise self._refusal(request, "was answered", error) from None
            else:
                return self._checked(request, answer)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_MOST_S)

    def until_ready(self, probe: "grpc.UnaryUnaryMultiCallable[Any, Any]") -> None:
        """Probe until the plugin is ready, as sidecars do before any other call. Raises AssertionError."""
        until = time.monotonic() + self._timeout_s
        while True:
            answer = self.until_final(probe, csi_pb2.ProbeRequest())
            if not answer.HasField("ready") or answer.ready.value:
                return
            assert time.monotonic() < until, "Probe is OK, and not ready"
            time.sleep(_RETRY_FIRST_S)

    def stream(
        self, method: "grpc.UnaryStreamMultiCallable[Request, Answer]", request: Request
    ) -> list[Answer]:
        """All messages of a stream that must end OK."""
        try:
            found = list(method(request, timeout=self._timeout_s))
        except grpc.RpcError as error:
            raise self._refusal(request, "ended", error) from None
        for each in found:
            self._checked(request, each)
        return found

    def stream_refused(
        self,
        method: "grpc.UnaryStreamMultiCallable[Request, Answer]",
        request: Request,
        *codes: grpc.StatusCode,
    ) -> None:
        """A stream that must end with one of `codes`. Raises AssertionError."""
        code, _ = self.stream_outcome(method, request)
        name, wanted = type(request).__name__, " or ".join(each.name for each in codes)
        assert code in codes, f"{name} ended {code.name}, must end {wanted}"

    def stream_outcome(
        self, method: "grpc.UnaryStreamMultiCallable[Request, Answer]", request: Request
    ) -> tuple[grpc.StatusCode, str]:
        """A stream that may be served or refused; returns the code and the message."""
        try:
            for each in method(request, timeout=self._timeout_s):
                self._checked(request, each)
        except grpc.RpcError as error:
            return self._refused(request, error)
        return Code.OK, ""

    def _checked(self, request: Message, answer: Answer) -> Answer:
        self._last = lambda: exchange.of(request, Code.OK.name, answer)
        check_limits(answer)
        return answer

    def _refused(self, request: Message, error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
        assert isinstance(error, grpc.Call)
        code, why = error.code().name, error.details() or ""
        self._last = lambda: exchange.of(request, code, why)
        check_refusal(error)
        return error.code(), error.details() or ""

    def _refusal(self, request: Message, verb: str, error: grpc.RpcError) -> Refusal:
        """What a driver author reads; gRPC's own stack adds nothing."""
        assert isinstance(error, grpc.Call)
        code, why = error.code().name, error.details() or ""
        self._last = lambda: exchange.of(request, code, why)
        text = f"{type(request).__name__} {verb} {code}: {_without_secrets(request, why)}"
        return Refusal(error.code(), text)


def _without_secrets(request: Message, text: str) -> str:
    return redaction.without_secrets(text, "", request)


def _settled(future: "grpc._CallFuture[Answer]") -> Answer | grpc.StatusCode:
    try:
        answer: Answer = future.result()
        return answer
    except grpc.RpcError as error:
        check_refusal(error)
        assert isinstance(error, grpc.Call)
        return error.code()
    except grpc.FutureCancelledError:
        return Code.CANCELLED


def check_limits(answer: Message) -> None:
    """CSI "Size Limits" hold in both directions; raises AssertionError that names the field."""
    for name, size_bytes, limit in _sizes(answer):
        assert size_bytes <= limit, f"{name} has {size_bytes} bytes, CSI allows {limit}"


def check_refusal(error: grpc.RpcError) -> None:
    """CSI "Error Scheme": a message that a human can read, and no details."""
    assert isinstance(error, grpc.Call)
    assert (error.details() or "").strip(), f"{error.code()} came without a message"
    keys = [key for key, _ in error.trailing_metadata() or ()]
    assert _DETAILS not in keys, f"{error.code()} came with status details, which CSI forbids"


def _sizes(message: Message) -> Iterator[tuple[str, int, int]]:
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is None:
            if field.type == FieldDescriptor.TYPE_STRING:
                yield from _strings(field, value)
        elif kind.GetOptions().map_entry:
            yield field.full_name, _map_bytes(value), MAP_MAX_BYTES
        elif kind.full_name not in _EXTENSIONS:
            for each in value if field.is_repeated else [value]:
                yield from _sizes(each)


def _strings(field: FieldDescriptor, value: object) -> Iterator[tuple[str, int, int]]:
    limit = _OTHER_LIMITS.get(field.full_name, STRING_MAX_BYTES)
    for each in [value] if isinstance(value, str) else list(value):  # type: ignore[call-overload]
        yield field.full_name, len(each.encode()), limit


def _map_bytes(value: dict[str, str]) -> int:
    return sum(len(key.encode()) + len(each.encode()) for key, each in value.items())
