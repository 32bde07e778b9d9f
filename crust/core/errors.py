"""Errors. The branch says what the caller should do; the name says what happened.

Branches are the direct subclasses of `CrustError` below; each has one gRPC code, and says what to do.
An error is named where it is raised: `errors.NotReady.named("StillDeferred", what, why=…, hint=…)`. An error has a
class of its own, a leaf, only where code catches it by its name, reads its fields, or raises it at several places;
the package that raises it defines it. Only `crust.rpc.status` knows gRPC codes. Errors do not log: the server that
answers logs them, once. No field may hold a secret, because messages reach the CO's events and every log.

A name is unique in the project and stable (docs/api.md): a message to a caller begins with `[MountFailed]`, the log
has it as `error_name`. docs/errors.md, a part of the package, is the one table of the names. It owns what happened
and what to do about it: the message of an error without a `hint` of its own ends with that, `crust explain
MountFailed` prints both, and a class has a docstring only for what its callers need beyond them.
"""

import re
from pathlib import Path
from typing import ClassVar, Self

TABLE = Path(__file__).parents[1].joinpath("errors.md").read_text(encoding="utf-8")
"""docs/errors.md, as the wheel has it."""

_ROW = re.compile(r"\| `(\w+)` \| .* \| (.*) \|")
ADVICE = {
    row[1]: row[2].replace("\\|", "|") for row in map(_ROW.fullmatch, TABLE.splitlines()) if row
}
"""What to do about an error, by its name."""


class CrustError(Exception):
    """Base of all errors of crust.

    `what` failed, `why`, and what to do about it (`hint`: the table's, unless the case needs one of its own). All
    three are for people; `why` and `hint` may be empty.
    """

    answered_as: "ClassVar[type[CrustError] | None]" = None
    """The branch that gives the status code, where it is not the error's own (crust/host/process/syscalls.py)."""

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(what, why, hint)
        self.what = what
        self.why = why
        self.hint = hint or ADVICE.get(type(self).__name__, "")
        self.error_name = type(self).__name__
        """The class's name for a leaf. An error that a peer answered with keeps the peer's name."""

    @classmethod
    def named(cls, name: str, what: str, *, why: str = "", hint: str = "") -> Self:
        """An error of this branch without a class of its own. `name`, a literal, has a row in docs/errors.md."""
        error = cls(what, why=why, hint=hint or ADVICE.get(name, ""))
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


class NotFound(CrustError):
    """The named object does not exist."""


class Conflict(CrustError):
    """The object exists already and differs from the request."""


class OperationPending(CrustError):
    """Another operation on the same object is running."""


class NotReady(CrustError):
    """The state of the system does not allow the operation now."""


class Unsupported(CrustError):
    """This process does not serve the call, in this mode or at all."""


class OutOfRange(CrustError):
    """A size or an offset is outside of the possible range."""


class Exhausted(CrustError):
    """No space, slot or memory is left."""


class Refused(CrustError):
    """The caller may not do this, or the path is not allowed."""


class PeerUnavailable(CrustError):
    """The process that must answer does not run, or did not answer in time."""


class Corrupt(CrustError):
    """The data on disk is damaged or unknown; crust keeps it for a person to look at."""


class RuntimeFailed(CrustError):
    """A program, the kernel or a runtime failed."""
