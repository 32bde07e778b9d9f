"""Converts errors to gRPC statuses and statuses to errors, by one table.

An error's code is that of its nearest class in the table; a leaf needs a row of its own only if the CSI specification
names another code than its branch has. A peer's status becomes the branch of its code, with the peer's sentence and
the peer's error name: so a chain of processes passes the first error on to the CO. crust never parses the text of a
peer's status: the name travels as google.rpc.ErrorInfo (`reason`, `domain`) in the status details, where every gRPC
library looks for it. crust uses only names of its own domain. CSI's Error Scheme says that the details MUST be empty,
so a CSI call gets them only if its caller asks for them. One exception: `csi_driver.py`, which does not ask, keeps a
name in front.

To a kubelet a *final* status means that no trace of the volume exists: it forgets the volume and never unpublishes
it. CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE, RESOURCE_EXHAUSTED and ABORTED are not final: the volume is
"uncertain", and the kubelet retries while the pod is wanted, and unpublishes afterwards. So an error has a fault and
a residue, and `allowed_error` gives the error that both together allow. Message and name of an error do not change.

One exception: CSI demands ALREADY_EXISTS for a second publish with other arguments. A kubelet never sends one, so if
a driver answers ALREADY_EXISTS for the same arguments, the status is UNAVAILABLE too.

Expansion has a rule of its own. A kubelet does not retry after FAILED_PRECONDITION until the pod is restarted, so
only an error that a restart removes may have that status.
"""

import enum
import re
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message as protobuf
from google.rpc import error_details_pb2, status_pb2

from crust.core import credentials, errors, logs
from crust.rpc.call import Call, Metadata
from crust.rpc.messages import extensions

DOMAIN = "crust.dev"
DETAILS_KEY = "grpc-status-details-bin"
"""The metadata of gRPC with the details of a status."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")

TIMED_OUT = "Deadline Exceeded"
"""gRPC's text, which says no more than the code."""

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

_BRANCHES: dict[grpc.StatusCode, type[errors.CrustError]] = {
    **{code: branch for branch, code in CODES.items()},
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.PeerUnavailable,
    grpc.StatusCode.CANCELLED: errors.PeerUnavailable,
    grpc.StatusCode.UNAUTHENTICATED: errors.Refused,
}

PEER_TEXT_MAX_BYTES = 64 << 10
"""The part of a peer's status text that passes unchanged (D-24)."""


class PeerStatus(errors.CrustError):
    """A peer has refused a call. Its status passes unchanged: code, text and metadata.

    A peer may be hostile: the constructor cuts the text first. As an error it has the peer's sentence, and the peer's
    error name if that is a name of crust.
    """

    is_own = False
    """Whether this process wrote it, because the peer gave no answer that could be passed on."""

    def __init__(self, code: grpc.StatusCode, text: str, trailing: Metadata = ()) -> None:
        self.code = code
        self.text = text
        if len(text) > PEER_TEXT_MAX_BYTES // 4:  # else it has as many bytes at most
            self.text = text.encode()[:PEER_TEXT_MAX_BYTES].decode("utf-8", "ignore")
        self.trailing = trailing
        is_timeout = code is grpc.StatusCode.DEADLINE_EXCEEDED
        name = name_in(trailing)
        message = (self.text or code.name)[: credentials.SHOWN_MAX_CHARS]
        if is_timeout:
            super().__init__(
                "the other process did not answer in time",
                why="" if message == TIMED_OUT else message,
                hint="look at its log, and at the storage or the guest behind it; the caller may retry",
            )
        else:
            super().__init__(message.removeprefix(f"[{name}] "))
        is_named = name and not is_timeout
        self.error_name = name if is_named else _BRANCHES.get(code, errors.RuntimeFailed).__name__

    @classmethod
    def of(cls, error: errors.CrustError) -> "PeerStatus":
        """The status that replaces gRPC's own, for an absent peer or a too large answer."""
        status = cls(code_of(error), error.shown())
        status.what, status.why, status.hint = error.what, error.why, error.hint
        status.error_name = error.error_name
        status.is_own = True
        return status


def code_of(error: errors.CrustError) -> grpc.StatusCode:
    return error.code if isinstance(error, PeerStatus) else CODES[branch_of(type(error))]


def branch_of(kind: type[errors.CrustError]) -> type[errors.CrustError]:
    """The branch from which errors of the class `kind` have their code."""
    if kind.answered_as is not None:
        return kind.answered_as
    return next((ancestor for ancestor in kind.__mro__ if ancestor in CODES), errors.RuntimeFailed)


def of(error: errors.CrustError, call: Call) -> PeerStatus:
    """The status that answers a call with `error`: its code, its name and sentence, and ErrorInfo.

    The status of a peer passes unchanged.
    """
    wants_name = extensions.requested(call.metadata, extensions.ERROR_INFO)
    is_plain = call.method.startswith("/csi.") and not wants_name
    if isinstance(error, PeerStatus) and (is_plain or not error.is_own):
        return error
    message = error.shown()
    if len(message) > _MESSAGE_MAX_CHARS:
        message = f"{message[: _MESSAGE_MAX_CHARS - 1]}…"
    if is_plain:
        return PeerStatus(code_of(error), message)
    fields = logs.context.get() or {}
    request_id = {"request_id": fields["request_id"]} if "request_id" in fields else {}
    details = status_pb2.Status(code=code_of(error).value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.error_name, domain=DOMAIN, metadata=request_id)
    details.details.add().Pack(info)
    return PeerStatus(code_of(error), message, ((DETAILS_KEY, details.SerializeToString()),))


def name_in(trailing_metadata: Any) -> str:
    """The name of an error of crust in the details of a status; empty if another program answered."""
    details = next((value for key, value in trailing_metadata or () if key == DETAILS_KEY), b"")
    info = error_details_pb2.ErrorInfo()
    try:
        for detail in status_pb2.Status.FromString(details).details:
            if detail.Unpack(info) and info.domain == DOMAIN and _NAME.fullmatch(info.reason):
                return info.reason
    except protobuf.DecodeError:  # details in a format of another program
        pass
    return ""


def to_error(status: PeerStatus) -> errors.CrustError:
    """The error for a peer's status: the branch of its code, its sentence, and its name if crust has it."""
    branch = _BRANCHES.get(status.code, errors.RuntimeFailed)
    error = branch(status.what, why=status.why, hint=status.hint)
    error.error_name = status.error_name
    return error


class Residue(enum.Enum):
    """The remains of a failed operation, on its volume and its path."""

    NONE = "nothing"
    EXISTS = "something, or it is not known"
    OTHER = "something that a request with other arguments made"


class DriverOutcome(enum.Enum):
    NOT_CALLED = "not called"
    REFUSED = "a final code"
    SILENT = "no answer, or a code after which it may be at work"
    ANSWERED = "OK"


class Undo(enum.Enum):
    NOTHING = "nothing"
    REMOVE = "what crust made: the proxy's guard mount, or the shim's leaf and its directory"
    UNPUBLISH = "the driver's unpublish, then the same"


NOT_FINAL: frozenset[type[errors.CrustError]] = frozenset(
    {errors.OperationPending, errors.PeerUnavailable, errors.Exhausted}
)
"""The branches after which a kubelet assumes that a publish may exist."""

REMOVED_BY_RESTART: frozenset[str] = frozenset({"OfflineExpansionOnly", "FilesystemNotGrown"})
"""Names of the errors of an expansion that no retry removes while the pod runs."""

_PUBLISHING = ("NodeStageVolume", "NodePublishVolume")
"""CSI answers ALREADY_EXISTS for other arguments in these."""


def allowed_error(rpc: str, error: errors.CrustError, residue: Residue) -> errors.CrustError:
    """The error to return: `error` itself if its branch is allowed, else its message and name as UNAVAILABLE."""
    decoded = to_error(error) if isinstance(error, PeerStatus) else error
    branch = branch_of(type(decoded))
    if rpc == "RuntimeExpandVolume":
        is_allowed = branch is not errors.NotReady or decoded.error_name in REMOVED_BY_RESTART
    else:
        is_others = residue is Residue.OTHER and branch is errors.Conflict and rpc in _PUBLISHING
        is_allowed = residue is Residue.NONE or branch in NOT_FINAL or is_others
    if is_allowed:
        return error
    answered = errors.PeerUnavailable(decoded.what, why=decoded.why, hint=decoded.hint)
    answered.error_name = decoded.error_name
    answered.__cause__ = error
    return answered


def is_final(error: PeerStatus) -> bool:
    """Whether a peer's status says that the call left no residue."""
    return _BRANCHES.get(error.code, errors.RuntimeFailed) not in NOT_FINAL
