"""Errors: the branch says what the caller should do, the leaf says what happened.

Branches are the direct subclasses of `CrustError` below; each has one gRPC code, says who retries and what to do.
Raise sites give data; the class makes the sentence: what, why, what to do. Leaves live in the room
that raises them and take their fields as constructor arguments. gRPC codes are in `crust.rpc.status`
alone. Errors never log: the edge that answers does, once. Nothing secret may enter a field, because
a message reaches the CO's events and every log.

An error's name is its class's, unique in the project and stable as docs/api.md says: `[MountFailed]` begins what
a caller is shown, `error_name` is the key in the log, and `crust explain MountFailed` prints its page.
"""

from typing import ClassVar


class CrustError(Exception):
    """Base of all errors of crust.

    `what` failed, `why`, and `hint`, what to do about it. All three are for people; `why` and `hint`
    may be empty.
    """

    retried_by: ClassVar[str] = ""
    """Who sends the call again. Set by the branch."""

    advice: ClassVar[str] = ""
    """What to do about any error of the branch; a leaf's `hint` is more precise."""

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(what, why, hint)
        self.what = what
        self.why = why
        self.hint = hint
        self.error_name = type(self).__name__
        """Differs from the class's for an error that a peer answered with: it keeps the peer's name."""

    def shown(self) -> str:
        """The sentence behind the name, for whoever stands outside: a caller, an event, a command line."""
        return f"[{self.error_name}] {self}"

    def __str__(self) -> str:
        sentence = f"{self.what}: {self.why}" if self.why else self.what
        return f"{sentence}; {self.hint}" if self.hint else sentence


class InvalidRequest(CrustError):
    """A field is missing, malformed or not supported."""

    retried_by = "nobody with success: the same request never works"
    advice = "correct the request, or the object that the CO made it from"


class NotFound(CrustError):
    """The thing that is named does not exist."""

    retried_by = "nobody with success, until the thing exists"
    advice = "treat the thing as absent"


class Conflict(CrustError):
    """It exists already, and is not what is asked for."""

    retried_by = "nobody with success, as long as the other one exists"
    advice = "compare the two; ask for what exists, use another name, or remove the other one"


class OperationPending(CrustError):
    """Another operation on the same thing is under way."""

    retried_by = "the CO, until that operation has ended; an identical retry joins it"
    advice = "wait"


class NotReady(CrustError):
    """The state of the system does not allow it now."""

    retried_by = "the CO; a retry succeeds once the state has changed"
    advice = "change the state: unmount, stop the sandbox, start a handler"


class Unsupported(CrustError):
    """The call is not served here, in this mode or at all."""

    retried_by = "nobody with success"
    advice = "do not ask for it here"


class OutOfRange(CrustError):
    """A size or an offset is outside of what is possible."""

    retried_by = "nobody with success: the same size never works"
    advice = "ask for another size"


class Exhausted(CrustError):
    """No space, no slot, no memory."""

    retried_by = "the CO; a retry succeeds once something was freed"
    advice = "free space or slots"


class Refused(CrustError):
    """The caller or the path is not allowed."""

    retried_by = "nobody with success"
    advice = "use a path or a caller that is allowed, or change the settings"


class PeerUnavailable(CrustError):
    """The process that must answer is away, or did not answer in time."""

    retried_by = "the CO, with backoff"
    advice = "start the process that is away, and read its log"


class Corrupt(CrustError):
    """What is on disk cannot be what was written; it is kept for a person to look at."""

    retried_by = "the CO, without success until a person has repaired it"
    advice = "look at it by hand; crust deletes nothing that it cannot read"


class RuntimeFailed(CrustError):
    """A program, the kernel or a runtime failed for a reason of its own."""

    retried_by = "the CO, with backoff"
    advice = "if the retries fail too, read the message and the log"
