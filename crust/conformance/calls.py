"""Calls of a CO; each answer is checked for what holds for all answers.

The one sleep of the suite is here: a CO that is answered ABORTED has nothing to wait on, and asks again after a
while, longer each time, as kubelets and sidecars do.
"""

import time
from collections.abc import Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from crust.conformance import answers

Request = TypeVar("Request", bound=Message)
Answer = TypeVar("Answer", bound=Message)
Code = grpc.StatusCode

# The codes after which a CO retries, since the call may still succeed (csi-and-kubelet: "non-final").
PENDING = (Code.ABORTED, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED)
_RETRY_FIRST_S = 0.02
_RETRY_MOST_S = 0.5


class Calls:
    """Sends requests. `timeout_s` is each call's deadline, and how long a retried call is retried."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def ask(
        self, method: "grpc.UnaryUnaryMultiCallable[Request, Answer]", request: Request
    ) -> Answer:
        """A call that must be answered OK, within the size limits. Raises AssertionError."""
        try:
            answer = method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            raise AssertionError(_failure(request, "was answered", error)) from None
        answers.check_limits(answer)
        return answer

    def refused(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Answer]",
        request: Request,
        *codes: grpc.StatusCode,
    ) -> str:
        """A call that must be refused with one of `codes`; returns the message. Raises AssertionError."""
        code, message = self.outcome(method, request)
        name, wanted = type(request).__name__, " or ".join(each.name for each in codes)
        assert code in codes, f"{name} was answered {code.name}, must be {wanted}: {message}"
        return message

    def outcome(
        self, method: "grpc.UnaryUnaryMultiCallable[Request, Answer]", request: Request
    ) -> tuple[grpc.StatusCode, str]:
        """A call that may be answered or refused; returns the code and the message."""
        try:
            answers.check_limits(method(request, timeout=self._timeout_s))
        except grpc.RpcError as error:
            answers.check_refusal(error)
            assert isinstance(error, grpc.Call)
            return error.code(), error.details() or ""
        return Code.OK, ""

    def concurrently(
        self,
        calls: Sequence[tuple["grpc.UnaryUnaryMultiCallable[Request, Answer]", Request]],
    ) -> list[Answer | grpc.StatusCode]:
        """All calls at once, each answered or refused; answers in the order of `calls`."""
        futures = [method.future(request, timeout=self._timeout_s) for method, request in calls]
        return [_settled(each) for each in futures]

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
                    raise AssertionError(_failure(request, "was answered", error)) from None
            else:
                answers.check_limits(answer)
                return answer
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_MOST_S)

    def stream(
        self, method: "grpc.UnaryStreamMultiCallable[Request, Answer]", request: Request
    ) -> list[Answer]:
        """All messages of a stream that must end OK."""
        try:
            found = list(method(request, timeout=self._timeout_s))
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            raise AssertionError(_failure(request, "ended", error)) from None
        for each in found:
            answers.check_limits(each)
        return found

    def stream_refused(
        self,
        method: "grpc.UnaryStreamMultiCallable[Request, Answer]",
        request: Request,
        *codes: grpc.StatusCode,
    ) -> None:
        """A stream that must end with one of `codes`. Raises AssertionError."""
        code, message = self.stream_outcome(method, request)
        name, wanted = type(request).__name__, " or ".join(each.name for each in codes)
        assert code in codes, f"{name} ended {code.name}, must end {wanted}: {message}"

    def stream_outcome(
        self, method: "grpc.UnaryStreamMultiCallable[Request, Answer]", request: Request
    ) -> tuple[grpc.StatusCode, str]:
        """A stream that may be served or refused; returns the code and the message."""
        try:
            for each in method(request, timeout=self._timeout_s):
                answers.check_limits(each)
        except grpc.RpcError as error:
            answers.check_refusal(error)
            assert isinstance(error, grpc.Call)
            return error.code(), error.details() or ""
        return Code.OK, ""


def _failure(request: Message, verb: str, error: grpc.Call) -> str:
    """What a driver author reads; gRPC's own stack adds nothing."""
    return f"{type(request).__name__} {verb} {error.code().name}: {error.details()}"


def _settled(future: "grpc._CallFuture[Answer]") -> Answer | grpc.StatusCode:
    try:
        answer: Answer = future.result()
        return answer
    except grpc.RpcError as error:
        answers.check_refusal(error)
        assert isinstance(error, grpc.Call)
        return error.code()
    except grpc.FutureCancelledError:
        return Code.CANCELLED
