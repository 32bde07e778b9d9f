"""What a status of etcd, or of gRPC on the way to it, means: for the next attempt, and for the reader of the error.

A change whose call ended with UNAVAILABLE or DEADLINE_EXCEEDED has perhaps been made, and perhaps will be later. So
what is sent must know itself again when it is sent twice: every write of crust is a transaction that compares first.

gRPC says in one sentence what happened on which layer, in words of its own; an operator gets the cause in ours.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import grpc.aio

from crust.cluster.protocol import StoreUnavailable

Code = grpc.StatusCode


class StoreWithoutQuorum(StoreUnavailable):
    """The members that answer have no leader: fewer than half of them run, or see each other."""

    def __init__(self, what: str, why: str, hint: str = "") -> None:
        super().__init__(
            what, why, hint=hint or "start the other members, and check the network between them"
        )


class StoreAccessDenied(StoreUnavailable):
    """The store refuses this certificate's user. Nothing was changed; the call succeeds once access is granted."""

    def __init__(self, what: str, why: str, hint: str = "") -> None:
        super().__init__(
            what, why, hint=hint or "grant the role again: docs/etcd.md, Users and roles"
        )


class StoreCertificateRefused(StoreUnavailable):
    """No connection to the store can be made with these certificates."""

    def __init__(self, what: str, why: str, hint: str = "") -> None:
        super().__init__(
            what,
            why,
            hint=hint or "issue a new certificate in place of the file: docs/etcd.md",
        )


class StoreFull(StoreUnavailable):
    """The store takes no more writes: its database has reached its quota."""

    def __init__(self, what: str, why: str, hint: str = "") -> None:
        super().__init__(
            what,
            why,
            hint=hint or "compact and defragment it, and disarm the alarm: docs/etcd.md",
        )


class StoreRequestRefused(StoreUnavailable):
    """The store calls a request of ours invalid, e.g. too large."""

    def __init__(self, what: str, why: str, hint: str = "") -> None:
        super().__init__(what, why, hint=hint or "if it is not too large, report it: it is a bug")


class Next(enum.Enum):
    """What can still succeed."""

    HERE = "here"
    """The same, at the same member."""
    ELSEWHERE = "elsewhere"
    """The same, at another member, or later."""
    NEVER = "never"
    """Nothing, until a person has changed something."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt."""

    kind: type[StoreUnavailable]
    why: str
    hint: str
    next: Next


class LeaseGone(Exception):
    """The lease has expired, or was lost with the store's data."""


_REVISION_IS_OLD = "revision of auth store is old"
"""Of a call that was under way while a role was changed."""

_START = "start etcd, and see that its members reach each other"
_CERTIFICATES = "docs/etcd.md, Certificates"
GRANT = "grant the role again: docs/etcd.md, Users and roles"

_TEXTS: tuple[tuple[str, type[StoreUnavailable], str, str], ...] = (
    ("no leader", StoreWithoutQuorum, "the member knows no leader", _START),
    ("request timed out", StoreWithoutQuorum, "the members did not agree in time", _START),
    ("leader changed", StoreWithoutQuorum, "the members are electing a leader", _START),
    ("Connection refused", StoreUnavailable, "nobody listens there", _START),
    ("No route to host", StoreUnavailable, "the host cannot be reached", "check the network"),
    ("Connection timed out", StoreUnavailable, "the host does not answer", "check the network"),
    ("certificate has expired", StoreCertificateRefused, "the member's certificate has expired", _CERTIFICATES),
    ("certificate is not yet valid", StoreCertificateRefused,
     "the member's certificate is not valid yet", f"compare the clocks; {_CERTIFICATES}"),
    ("CERTIFICATE_VERIFY_FAILED", StoreCertificateRefused,
     "the member's certificate is not signed by an authority of cluster.ca", _CERTIFICATES),
    ("Hostname Verification", StoreCertificateRefused,
     "the member's certificate does not have this address", _CERTIFICATES),
    ("TSI_DATA_CORRUPTED", StoreCertificateRefused,
     "the member refuses this process's certificate", f"its log says why; {_CERTIFICATES}"),
    ("security handshaker", StoreCertificateRefused,
     "the private key is not that of the certificate", _CERTIFICATES),
    ("Handshake read failed", StoreCertificateRefused,
     "the address is not served with TLS", "set cluster.endpoints to addresses with TLS"),
    ("reset by peer", StoreUnavailable,
     "the member closed the connection", "see whether the certificate was revoked, and etcd's log"),
    ("permission denied", StoreAccessDenied, "the certificate's user may not do this", GRANT),
    ("user name is empty", StoreAccessDenied, "the certificate names no user", _CERTIFICATES),
    ("too large", StoreRequestRefused, "the request is too large", "etcd takes 1.5 MiB"),
    ("larger than max", StoreRequestRefused, "the request is too large", "etcd takes 1.5 MiB"),
    ("space exceeded", StoreFull, "its database has reached its quota",
     "compact and defragment it, and disarm the alarm: docs/etcd.md"),
)  # fmt: skip
"""By words of the status; the first row that fits."""

_NEXT: Mapping[grpc.StatusCode, Next] = {
    Code.PERMISSION_DENIED: Next.NEVER,
    Code.UNAUTHENTICATED: Next.NEVER,
    Code.INVALID_ARGUMENT: Next.NEVER,
    Code.FAILED_PRECONDITION: Next.NEVER,
    Code.UNIMPLEMENTED: Next.NEVER,
    Code.RESOURCE_EXHAUSTED: Next.NEVER,
}
"""All others may be of the member or of the way to it."""


def failure(error: grpc.aio.AioRpcError) -> Failure:
    """What `error` means. Raises `LeaseGone` for a lease that is not there."""
    text = error.details() or ""
    code = error.code()
    if code is Code.NOT_FOUND and "lease not found" in text:
        raise LeaseGone from error
    if _REVISION_IS_OLD in text:
        return Failure(StoreUnavailable, "its roles were being changed", "", Next.HERE)
    if "too many requests" in text:
        return Failure(StoreUnavailable, "the member is overloaded", "", Next.ELSEWHERE)
    following = _NEXT.get(code, Next.ELSEWHERE)
    for words, kind, why, hint in _TEXTS:
        if words in text:
            return Failure(kind, why, hint, following)
    if code is Code.DEADLINE_EXCEEDED:
        return Failure(StoreUnavailable, "the member did not answer in time", _START, following)
    refused = StoreRequestRefused if following is Next.NEVER else StoreUnavailable
    return Failure(refused, f"{code.name}: {text[:200]}", "see etcd's log", following)


_TELLING = (
    StoreAccessDenied,
    StoreFull,
    StoreRequestRefused,
    StoreCertificateRefused,
    StoreWithoutQuorum,
)
"""If members fail for different reasons, the first of these names the error."""


def unavailable(what: str, found: Mapping[str, Failure]) -> StoreUnavailable:
    """The error for an attempt at each member, by address, that failed."""
    if not found:
        return StoreUnavailable(what, "there was no time left to ask it")
    kinds = {each.kind: each for each in found.values()}
    worst = next((kinds[kind] for kind in _TELLING if kind in kinds), next(iter(kinds.values())))
    why = "; ".join(f"{address}: {each.why}" for address, each in found.items())
    return worst.kind(what, why, worst.hint)
