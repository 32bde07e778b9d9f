"""The one table between errors and gRPC status codes, in both directions.

An error's code is that of its nearest class in the table; a leaf needs a row of its own only where the
CSI specification names another code than the branch has. Text is never parsed: a peer's status becomes the
branch that stands for its code, with the peer's message kept whole, so that a chain of processes hands
the first one's sentence to the CO.
"""

import grpc
import grpc.aio

from crust import errors

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

_BRANCHES: dict[grpc.StatusCode, type[errors.CrustError]] = {
    **{code: branch for branch, code in CODES.items()},
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.PeerUnavailable,
    grpc.StatusCode.CANCELLED: errors.PeerUnavailable,
    grpc.StatusCode.UNAUTHENTICATED: errors.Refused,
}


def code_of(error: errors.CrustError) -> grpc.StatusCode:
    """The gRPC status code that stands for `error`."""
    return code_of_class(type(error))


def code_of_class(kind: type[errors.CrustError]) -> grpc.StatusCode:
    """The gRPC status code that stands for errors of the class `kind`."""
    found = (CODES[ancestor] for ancestor in kind.__mro__ if ancestor in CODES)
    return next(found, grpc.StatusCode.INTERNAL)


def to_error(error: grpc.aio.AioRpcError) -> errors.CrustError:
    """The error that a peer's status stands for; its message is the peer's own sentence."""
    code = error.code()
    message = error.details() or code.name
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.PeerUnavailable("the other process did not answer in time", why=message)
    return _BRANCHES.get(code, errors.RuntimeFailed)(message)
