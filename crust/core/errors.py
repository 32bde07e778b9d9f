"""Errors. The branch says what the caller should do; the name says what happened.

Branches are the direct subclasses of `CrustError` below; each has one gRPC code, and says what to do.
An error is named where it is raised: `errors.NotReady.named("StillDeferred", what, why=…, hint=…)`. An error has a
class of its own, a leaf, only where code catches it by its name, reads its fields, or raises it at several places;
the package that raises it defines it. Only `crust.rpc.status` knows gRPC codes. Errors do not log: the server that
answers logs them, once. No field may hold a secret, because messages reach the CO's events and every log.

A name is unique in the project and stable (docs/api.md): a message to a caller begins with `[MountFailed]`, the log
has it as `error_name`. docs/errors.md is the one table of the names, which `crust explain MountFailed` prints from.
"""

from typing import ClassVar, Self


class CrustError(Exception):
    """Base of all errors of crust.

    `what` failed, `why`, and what to do about it (`hint`). All three are for people; `why` and `hint`
    may be empty.
    """

    advice: ClassVar[str] = ""
    """What to do about any error of the branch; a leaf's `hint` is more precise."""

    answered_as: "ClassVar[type[CrustError] | None]" = None
    """The branch that gives the status code, where it is not the error's own (crust/host/process/syscalls.py)."""

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(what, why, hint)
        self.what = what
        self.why = why
        self.hint = hint
        self.error_name = type(self).__name__
        """The class's name for a leaf. An error that a peer answered with keeps the peer's name."""

    @classmethod
    def named(cls, name: str, what: str, *, why: str = "", hint: str = "") -> Self:
        """An error of this branch without a class of its own. `name`, a literal, has a row in docs/errors.md."""
        error = cls(what, why=why, hint=hint)
        error.error_name = name
        return error

    def shown(self) -> str:
        """The name and the sentence, for callers, events and command lines."""
        return f"[{self.error_name}] {self}"

    def __str__(self) -> str:
        sentence = f"{self.what}: {self.why}" if self.why else self.what
        return f"{sentence}; {self.hint}" if self.hint else sentence


class InvalidRequest(CrustError):
    """A field of the request is missing, malformed or not supported."""

    advice = "correct the request, or the object that the CO made it from"


class NotFound(CrustError):
    """The named object does not exist."""

    advice = "treat the object as absent"


class Conflict(CrustError):
    """The object exists already and differs from the request."""

    advice = "compare the two; ask for the existing one, use another name, or remove it"


class OperationPending(CrustError):
    """Another operation on the same object is running."""

    advice = "wait"


class NotReady(CrustError):
    """The state of the system does not allow the operation now."""

    advice = "change the state: unmount, stop the sandbox, start a handler"


class Unsupported(CrustError):
    """This process does not serve the call, in this mode or at all."""

    advice = "do not ask for it here"


class OutOfRange(CrustError):
    """A size or an offset is outside of the possible range."""

    advice = "ask for another size"


class Exhausted(CrustError):
    """No space, slot or memory is left."""

    advice = "free space or slots"


class Refused(CrustError):
    """The caller may not do this, or the path is not allowed."""

    advice = "use a path or a caller that is allowed, or change the settings"


class PeerUnavailable(CrustError):
    """The process that must answer does not run, or did not answer in time."""

    advice = "start the process that is away, and read its log"


class Corrupt(CrustError):
    """The data on disk is damaged or unknown; crust keeps it for a person to look at."""

    advice = "look at it by hand; crust deletes nothing that it cannot read"


class RuntimeFailed(CrustError):
    """A program, the kernel or a runtime failed."""

    advice = "if the retries fail too, read the message and the log"
