"""Calls of a CO. Each answer is checked by the rules for all answers, and the last exchange is kept for the report.

A request's type is its RPC. CSI lets a driver be two plugins, each with Identity: a call of the Node service goes to
the node part, any other one to the controller part, whose capabilities are the driver's.

The suite sleeps only here: after ABORTED a CO has no event to wait for, and repeats the call after a pause, longer
each time, as kubelets and sidecars do.
"""

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from crust.rpc import channel
from crust.rpc.messages import redaction
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust_conformance.results import Exchange

Code = grpc.StatusCode

# The codes after which a CO retries, since the call may still succeed (csi-and-kubelet: "non-final").
PENDING = (Code.ABORTED, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED)
_RETRY_FIRST_S = 0.02
_RETRY_MOST_S = 0.5
UNKNOWN = "conformance-no-such-thing"
"""An id that no driver has returned: of a volume, a node, a snapshot, a group."""

STRING_MAX_BYTES = 128
MAP_MAX_BYTES = 4096
_OTHER_LIMITS = {"csi.v1.NodeGetInfoResponse.node_id": 256}
_EXTENSIONS = ("csi.v1.DeferredMount",)
"""Not of the specification: its paths and options have limits of their own."""
_STREAMS = grpc.UnaryStreamMultiCallable
_DETAILS = "grpc-status-details-bin"
_SHOWN = 700
"""Enough characters for every request of the suite, except the cases of size limits."""


class Channels(NamedTuple):
    """The channels to a driver's two parts, which may be one."""

    node: grpc.Channel
    controller: grpc.Channel


@contextmanager
def connected(node: str, controller: str = "") -> Iterator[Channels]:
    """Channels to the socket `node`, and for all but the node's service to `controller` if there is one."""
    settings = [*channel.OPTIONS, ("grpc.default_authority", "localhost")]
    with ExitStack() as stack:
        node_part, controller_part = (
            stack.enter_context(
                closing(grpc.insecure_channel(channel.target_of(socket), options=settings))
            )
            for socket in (node, controller or node)
        )
        yield Channels(node_part, controller_part)


class Refusal(AssertionError):
    """A call that had to be answered OK was refused. The text is for a driver's author."""

    def __init__(self, request: Message, error: Any) -> None:
        self.error: grpc.RpcError = error
        self.code: grpc.StatusCode = error.code()
        self.message: str = error.details() or ""
        shown = redaction.without_secrets(self.message, request)
        super().__init__(f"{type(request).__name__} was answered {self.code.name}: {shown}")


class Calls:
    """Sends requests. `timeout_s` is each call's deadline, and how long a retried call is retried.

    An answer is the RPC's response, or the list of responses of a streaming RPC. Every request with a field for
    secrets gets the driver's secrets.
    """

    def __init__(
        self, channels: Channels, timeout_s: float, secrets: Mapping[str, str] | None = None
    ) -> None:
        self.timeout_s = timeout_s
        self.secrets = dict(secrets or {})
        self._last: Callable[[], Exchange] = Exchange
        stubs = (
            csi_pb2_grpc.IdentityStub,
            csi_pb2_grpc.ControllerStub,
            csi_pb2_grpc.GroupControllerStub,
            csi_pb2_grpc.SnapshotMetadataStub,
        )
        self._stubs = (
            csi_pb2_grpc.NodeStub(channels.node),
            *(s(channels.controller) for s in stubs),
        )

    def method(self, request: Message) -> Any:
        """gRPC's callable of the request's RPC."""
        name = request.DESCRIPTOR.name.removesuffix("Request")
        return next(getattr(stub, name) for stub in self._stubs if hasattr(stub, name))

    @property
    def last(self) -> Exchange:
        """The last call for a report. Only a finding makes it into text."""
        return self._last()

    def ask(self, request: Message) -> Any:
        """A call that must be answered OK, within the size limits. Raises AssertionError."""
        reply = self.sent(request)
        if isinstance(reply, Refusal):
            raise reply
        return reply

    def answered(
        self, request: Message, *codes: grpc.StatusCode, **options: Any
    ) -> grpc.StatusCode:
        """A call that must be answered with one of `codes`; returns the code. Raises AssertionError."""
        code, _ = self.outcome(request, **options)
        check_code(request, code, *codes)
        return code

    def refused_without(self, request: Message, *fields: str) -> None:
        """Without any one of its required fields, the request must be refused. Raises AssertionError."""
        for field in fields:
            lacking = copy.deepcopy(request)
            lacking.ClearField(field)
            self.answered(lacking, Code.INVALID_ARGUMENT)

    def refused_with_unknown(self, request: Message, *fields: str) -> None:
        """With an unknown id in any one of the fields, the answer must be NOT_FOUND. Raises AssertionError."""
        for field in fields:
            unknown = copy.deepcopy(request)
            setattr(unknown, field, UNKNOWN)
            self.answered(unknown, Code.NOT_FOUND)

    def unknown(self, request: Message) -> None:
        """An undo for a volume that does not exist: CSI says NOT_FOUND, and idempotency OK."""
        self.answered(request, Code.OK, Code.NOT_FOUND)

    def reply(self, request: Message, **options: Any) -> Any:
        """The answer of a call that a driver may refuse, or the `Refusal`, whose code the case judges."""
        reply = self.sent(request, **options)
        if isinstance(reply, Refusal):
            check_refusal(reply.error)
        return reply

    def outcome(self, request: Message, **options: Any) -> tuple[grpc.StatusCode, str]:
        """A call that may be answered or refused; returns the code and the message."""
        reply = self.reply(request, **options)
        return (reply.code, reply.message) if isinstance(reply, Refusal) else (Code.OK, "")

    def concurrently(self, requests: Sequence[Message]) -> list[Any]:
        """Make all calls at once, each answered or refused; returns answers, or codes, in their order."""
        futures = [self.begun(request) for request in requests]
        replies = [_settled(future) for future in futures]
        codes = [reply.name if isinstance(reply, Code) else Code.OK.name for reply in replies]
        summary, times = ", ".join(codes), len(requests)
        self._last = lambda: exchange(requests[0], summary, "", times=times)
        return replies

    def begun(self, request: Message, timeout_s: float = 0, **options: Any) -> Any:
        """The future of a running call, by default with the usual deadline."""
        request = self._with_secrets(request)
        return self.method(request).future(request, timeout=timeout_s or self.timeout_s, **options)

    def abandoned(self, request: Message, after_s: float) -> None:
        """A call that is cancelled after `after_s`; its result does not matter."""
        _settled(self.begun(request, after_s))

    def until_final(self, request: Message, **options: Any) -> Any:
        """A call that is sent again until its code is final, as a CO does. Raises AssertionError."""
        until, pause_s = time.monotonic() + self.timeout_s, _RETRY_FIRST_S
        while True:
            reply = self.sent(request, wait_for_ready=True, **options)
            if not isinstance(reply, Refusal):
                return reply
            if reply.code not in PENDING or time.monotonic() > until:
                raise reply
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_MOST_S)

    def until_ready(self) -> None:
        """Probe until the plugin is ready, as sidecars do before any other call. Raises AssertionError."""
        until = time.monotonic() + self.timeout_s
        while True:
            answer = self.until_final(csi_pb2.ProbeRequest())
            if not answer.HasField("ready") or answer.ready.value:
                return
            assert time.monotonic() < until, "Probe is OK, and not ready"
            time.sleep(_RETRY_FIRST_S)

    def sent(self, request: Message, **options: Any) -> Any:
        """The checked answer, or the refusal. `options` are gRPC's."""
        method, request = self.method(request), self._with_secrets(request)
        try:
            answer = method(request, timeout=self.timeout_s, **options)
            answers = list(answer) if isinstance(method, _STREAMS) else [answer]
        except grpc.RpcError as error:
            refusal = Refusal(request, error)
            self._last = lambda: exchange(request, refusal.code.name, refusal.message)
            return refusal
        for message in answers:
            self._last = partial(exchange, request, Code.OK.name, message)
            check_limits(message)
        return answers if isinstance(method, _STREAMS) else answer

    def _with_secrets(self, request: Any) -> Any:
        """A copy with the secrets; secrets that a case has set in the request stay."""
        if not self.secrets or "secrets" not in request.DESCRIPTOR.fields_by_name:
            return request
        request = copy.deepcopy(request)
        for key, secret in self.secrets.items():
            request.secrets.setdefault(key, secret)
        return request


def _settled(future: Any) -> Any:
    try:
        return future.result()
    except grpc.RpcError as error:
        check_refusal(error)
        assert isinstance(error, grpc.Call)
        return error.code()
    except grpc.FutureCancelledError:
        return Code.CANCELLED


def check_code(
    request: Message, code: grpc.StatusCode, *codes: grpc.StatusCode, asked: str = ""
) -> None:
    """The code must be one of `codes`; `asked` says what was special. Raises AssertionError, a sentence."""
    name, expected = f"{type(request).__name__}{asked}", " or ".join(code.name for code in codes)
    assert code in codes, f"{name} was answered {code.name}, must be {expected}"


def check_limits(answer: Message) -> None:
    """CSI "Size Limits" hold in both directions; raises AssertionError that names the field."""
    for name, size_bytes, limit in _sizes(answer):
        assert size_bytes <= limit, f"{name} has {size_bytes} bytes, CSI allows {limit}"


def check_refusal(error: grpc.RpcError) -> None:
    """Check CSI "Error Scheme": a message that a human can read, and no details."""
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
            for nested in value if field.is_repeated else [value]:
                yield from _sizes(nested)


def _strings(field: FieldDescriptor, value: object) -> Iterator[tuple[str, int, int]]:
    limit = _OTHER_LIMITS.get(field.full_name, STRING_MAX_BYTES)
    for text in [value] if isinstance(value, str) else list(value):  # type: ignore[call-overload]
        yield field.full_name, len(text.encode()), limit


def _map_bytes(value: dict[str, str]) -> int:
    return sum(len(key.encode()) + len(text.encode()) for key, text in value.items())


def exchange(request: Message, code: str, answer: Message | str, *, times: int = 1) -> Exchange:
    """One call as a report shows it, or `times` equal ones at once."""
    at_once = f"{times} at once: " if times > 1 else ""
    if isinstance(answer, Message):
        got = f"{code} {_shown(answer)}"
    else:
        got = f"{code}: {redaction.without_secrets(answer, request)}"
    return Exchange(f"{at_once}{_shown(request)}", _cut(got))


def _shown(message: Message) -> str:
    fields = json.dumps(redaction.describe(message), ensure_ascii=False, default=repr)
    return _cut(f"{message.DESCRIPTOR.name} {fields}")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
