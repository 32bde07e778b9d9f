"""Converts errors to gRPC statuses and statuses to errors, by one table.

An error's code is that of its nearest class in the table; a leaf needs a row of its own only if the CSI specification
names another code than its branch has. A peer's status becomes the branch of its code, with the peer's sentence and
the peer's error name: so a chain of processes passes the first error on to the CO. Message text is never parsed: the
name travels as google.rpc.ErrorInfo (`reason`, `domain`) in the status details, where every gRPC library looks for
it. Only names of crust's own domain are used. CSI's Error Scheme says that the details MUST be empty, so a CSI call
gets them only if its caller asks for them.
"""

import re
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import message as protobuf
from google.rpc import error_details_pb2, status_pb2

from crust import credentials, errors, logs
from crust.rpc import calls
from crust.rpc.messages import extensions

DOMAIN = "crust.dev"
DETAILS_KEY = "grpc-status-details-bin"
"""The metadata in which gRPC keeps the details of a status."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")

_TIMED_OUT = "Deadline Exceeded"
"""What gRPC says, which says nothing more than the code."""

_MESSAGE_MAX_CHARS = 2000
"""gRPC refuses 8 KiB or more of metadata, message and details together. The log has the whole sentence."""

CODES: dict[type[errors.CrustError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Conflict: grpc.StatusCode.ALREADY_EXISTS,
    errors.OperationPending: grpc.StatusCode.ABORTED,
    errors.NotReady: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Refused: grpc.StatusCode.PERMISSION_DENIED,
    errors.PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Corrupt: grpc.StatusCode.DATA_LOSS,
    errors.RuntimeFailed: grpc.StatusCode.INTERNAL,
}

_STATUS: dict[object, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

_BRANCHES: dict[grpc.StatusCode, type[errors.CrustError]] = {
    **{code: branch for branch, code in CODES.items()},
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.PeerUnavailable,
    grpc.StatusCode.CANCELLED: errors.PeerUnavailable,
    grpc.StatusCode.UNAUTHENTICATED: errors.Refused,
}


def code_of(error: errors.CrustError) -> grpc.StatusCode:
    """The gRPC status code of `error`."""
    return code_of_class(type(error))


def code_of_class(kind: type[errors.CrustError]) -> grpc.StatusCode:
    """The gRPC status code of errors of the class `kind`."""
    return CODES[branch_of(kind)]


def branch_of(kind: type[errors.CrustError]) -> type[errors.CrustError]:
    """The branch that gives errors of the class `kind` their code."""
    if kind.answered_as is not None:
        return kind.answered_as
    return next((each for each in kind.__mro__ if each in CODES), errors.RuntimeFailed)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: errors.CrustError, *, is_csi: bool
) -> NoReturn:
    """Answer a call with `error`: its code, its name and sentence, and ErrorInfo. Does not return."""
    code = code_of(error)
    message = error.shown()
    if len(message) > _MESSAGE_MAX_CHARS:
        message = f"{message[: _MESSAGE_MAX_CHARS - 1]}…"
    if is_csi and not extensions.error_info_requested(context):
        await context.abort(code, message)
    await context.abort(code, message, ((DETAILS_KEY, details_of(error, message)),))


def details_of(error: errors.CrustError, message: str) -> bytes:
    """The details of the status for `error` (google.rpc.Status), in which its name is ErrorInfo."""
    details = status_pb2.Status(code=code_of(error).value[0], message=message)
    details.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=error.error_name, domain=DOMAIN, metadata=_request_id())
    )
    return details.SerializeToString()


def _request_id() -> dict[str, str]:
    fields = logs.context.get() or {}
    return {"request_id": fields["request_id"]} if "request_id" in fields else {}


def of_context(context: Any) -> grpc.StatusCode:
    """The code of a call that was answered."""
    code: object = context.code()  # grpc.aio has a number here, in spite of its type stub
    return code if isinstance(code, grpc.StatusCode) else _STATUS[code]


def name_in(trailing_metadata: Any) -> str:
    """The name of an error of crust in the details of a status; empty if another program answered."""
    for key, value in trailing_metadata or ():
        if key == DETAILS_KEY:
            return _name_of(value)
    return ""


def _name_of(details: bytes) -> str:
    info = error_details_pb2.ErrorInfo()
    try:
        for each in status_pb2.Status.FromString(details).details:
            if each.Unpack(info) and info.domain == DOMAIN and _NAME.fullmatch(info.reason):
                return info.reason
    except protobuf.DecodeError:  # details in a format of another program
        return ""
    return ""


def to_error(error: grpc.aio.AioRpcError) -> errors.CrustError:
    """The error for a peer's status: the branch of its code, its sentence, and its name if it is one of crust's."""
    if isinstance(error, calls.StatusOfGrpc):
        return error.error
    code = error.code()
    message = (error.details() or code.name)[: credentials.SHOWN_MAX_CHARS]
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.PeerUnavailable(
            "the other process did not answer in time",
            why="" if message == _TIMED_OUT else message,
            hint="look at its log, and at the storage or the guest behind it; the caller may retry",
        )
    branch = _BRANCHES.get(code, errors.RuntimeFailed)
    name = name_in(error.trailing_metadata())
    if not name:
        return branch(message)
    found = branch(message.removeprefix(f"[{name}] "))
    found.error_name = name
    return found
