"""What exists after a failed call, and which status may therefore be returned to its caller.

To a kubelet a *final* status means that nothing exists: it forgets the volume and never unpublishes it. CANCELLED,
DEADLINE_EXCEEDED, UNAVAILABLE, RESOURCE_EXHAUSTED and ABORTED are not final: the volume is "uncertain", retried while
its pod is wanted and unpublished when it is not. So an error says what is wrong, its residue says what exists, and
`branch` gives the branch that both together allow. The message and the error's name do not change.

One exception: CSI demands ALREADY_EXISTS for a second publish with other arguments. A kubelet never sends one, so
where a driver answers ALREADY_EXISTS although the arguments are the same, the status is UNAVAILABLE too.

Expansion has a rule of its own. A kubelet does not retry after FAILED_PRECONDITION until the pod is restarted, so
only an error that a restart removes may have that status.
"""

import enum

from crust.core import errors
from crust.rpc import status
from crust.rpc.status import PeerStatus

Branch = type[errors.CrustError]


class Residue(enum.Enum):
    """What exists after an operation failed, of the volume and the path that it is about."""

    NONE = "nothing"
    EXISTS = "something, or it is not known"
    OTHER = "something that a request with other arguments made"


class Asked(enum.Enum):
    """What the driver said to the call of a publish."""

    NOT_CALLED = "not called"
    REFUSED = "a final code"
    SILENT = "no answer, or a code after which it may be at work"
    ANSWERED = "OK"


NOT_FINAL: frozenset[Branch] = frozenset(
    {errors.OperationPending, errors.PeerUnavailable, errors.Exhausted}
)
"""The branches after which a kubelet assumes that something may exist."""

REMOVED_BY_RESTART: frozenset[str] = frozenset({"OfflineExpansionOnly", "FilesystemNotGrown"})
"""Names of the errors of an expansion that no retry removes while the pod runs."""


def branch(rpc: str, error: errors.CrustError, residue: Residue) -> Branch:
    """The branch to answer `error` with."""
    own = status.branch_of(type(error))
    if rpc == "RuntimeExpandVolume":
        waits = own is errors.NotReady and error.error_name not in REMOVED_BY_RESTART
        return errors.PeerUnavailable if waits else own
    if residue is Residue.NONE or own in NOT_FINAL:
        return own
    if own is errors.Conflict and residue is Residue.OTHER and rpc == "NodePublishVolume":
        return own
    return errors.PeerUnavailable


def answer(rpc: str, error: errors.CrustError, residue: Residue) -> errors.CrustError:
    """The error to return: `error` itself, or its message and name in the branch that both allow."""
    known = status.to_error(error) if isinstance(error, PeerStatus) else error
    allowed = branch(rpc, known, residue)
    if allowed is status.branch_of(type(known)):
        return error
    answered = allowed(known.what, why=known.why, hint=known.hint)
    answered.error_name = known.error_name
    answered.__cause__ = error
    return answered


def is_final(error: PeerStatus) -> bool:
    """Whether a peer's status says that nothing of the call exists."""
    return status.branch_of(type(status.to_error(error))) not in NOT_FINAL
