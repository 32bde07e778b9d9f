"""What exists after a failed call, and which status may therefore be returned to its caller.

To a kubelet a *final* status means that nothing exists: it forgets the volume and never unpublishes it. CANCELLED,
DEADLINE_EXCEEDED, UNAVAILABLE, RESOURCE_EXHAUSTED and ABORTED are not final: the volume is "uncertain", retried while
its pod is wanted and unpublished when it is not. So an error says what is wrong, its residue says what exists, and
the table gives the branch that both together allow. The message and the error's name do not change.

One exception: CSI demands ALREADY_EXISTS for a second publish with other arguments. A kubelet never sends one, so
where a driver answers ALREADY_EXISTS although the arguments are the same, the status is UNAVAILABLE too.

Expansion has a rule of its own. A kubelet does not retry after FAILED_PRECONDITION until the pod is restarted, so
only an error that a restart removes may have that status.
"""

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from crust.core import errors
from crust.rpc import status
from crust.rpc.status import PeerStatus

Branch = type[errors.CrustError]


class Residue(enum.Enum):
    """What exists after an operation failed, of the volume and the path that it is about."""

    NONE = "nothing"
    EXISTS = "something"
    OTHER = "something that a request with other arguments made"
    UNKNOWN = "not known"


NOT_FINAL: frozenset[Branch] = frozenset(
    {errors.OperationPending, errors.PeerUnavailable, errors.Exhausted}
)
"""The branches after which a kubelet assumes that something may exist."""

REMOVED_BY_RESTART: frozenset[str] = frozenset({"OfflineExpansionOnly", "FilesystemNotGrown"})
"""Names of the errors of an expansion that no retry removes while the pod runs."""


def _not_final_after(
    rpc: str, residues: Iterable[Residue]
) -> dict[tuple[str, Branch, Residue], Branch]:
    final = [branch for branch in status.CODES if branch not in NOT_FINAL]
    return {(rpc, branch, each): errors.PeerUnavailable for branch in final for each in residues}


TABLE: Mapping[tuple[str, Branch, Residue], Branch] = MappingProxyType(
    {
        **_not_final_after("NodePublishVolume", (Residue.EXISTS, Residue.OTHER, Residue.UNKNOWN)),
        ("NodePublishVolume", errors.Conflict, Residue.OTHER): errors.Conflict,
        **_not_final_after("NodeStageVolume", (Residue.EXISTS, Residue.UNKNOWN)),
        **{
            ("RuntimeExpandVolume", errors.NotReady, each): errors.PeerUnavailable
            for each in Residue
        },
    }
)
"""(RPC, branch, residue) to the branch to answer with. What is not listed is answered as it is."""


def branch(rpc: str, error: errors.CrustError, residue: Residue) -> Branch:
    """The branch to answer `error` with."""
    own = status.branch_of(type(error))
    if rpc == "RuntimeExpandVolume" and error.error_name in REMOVED_BY_RESTART:
        return own
    return TABLE.get((rpc, own, residue), own)


def answer(rpc: str, error: errors.CrustError, residue: Residue) -> errors.CrustError:
    """The error to return: `error` itself, or its message and name in the branch that the table gives."""
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
