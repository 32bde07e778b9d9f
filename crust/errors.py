"""Errors: the branch says what the caller should do, the leaf says what happened.

    CrustError
    ├─ InvalidRequest     fix the request; the same one will never work
    ├─ NotFound           treat the thing as absent
    ├─ Conflict           it exists and differs; stop and look
    ├─ OperationPending   somebody is at it; ask again later
    ├─ NotReady           change the state first (unmount, stop the sandbox, start a handler)
    ├─ Unsupported        this will never be served here
    ├─ OutOfRange         ask for another size
    ├─ Exhausted          free space or slots, then retry
    ├─ Refused            the caller may not
    ├─ PeerUnavailable    the other process is away; retry with backoff
    ├─ Corrupt            a human must look; nothing is deleted
    └─ RuntimeFailed      a program or the kernel failed; retry, then look

Raise sites give data; the class makes the sentence: what, why, what to do. Leaves live in the room
that raises them and take their fields as constructor arguments. gRPC codes are in `crust.rpc.status`
alone. Errors never log: the edge that answers does, once. Nothing secret may enter a field, because
a message reaches the CO's events and every log.

An error's name is its class's, unique in the project and stable as docs/api.md says: `[MountFailed]` begins what
a caller is shown, `error_name` is the key in the log, and `crust explain MountFailed` prints its page.
"""


class CrustError(Exception):
    """Base of all errors of crust.

    `what` failed, `why`, and `hint`, what to do about it. All three are for people; `why` and `hint`
    may be empty.
    """

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


class NotFound(CrustError):
    """The thing that is named does not exist."""


class Conflict(CrustError):
    """It exists already, and is not what is asked for."""


class OperationPending(CrustError):
    """Another operation on the same thing is under way."""


class NotReady(CrustError):
    """The state of the system does not allow it now."""


class Unsupported(CrustError):
    """The call is not served here, in this mode or at all."""


class OutOfRange(CrustError):
    """A size or an offset is outside of what is possible."""


class Exhausted(CrustError):
    """No space, no slot, no memory."""


class Refused(CrustError):
    """The caller or the path is not allowed."""


class PeerUnavailable(CrustError):
    """The process that must answer is away, or did not answer in time."""


class Corrupt(CrustError):
    """What is on disk cannot be what was written; it is kept for a person to look at."""


class RuntimeFailed(CrustError):
    """A program, the kernel or a runtime failed for a reason of its own."""
