"""The finding of a check."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from crust.core import errors


class Level(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: `what` was found, `why` it matters, and what to do. `check` is the name of its check."""

    level: Level
    what: str
    why: str = ""
    todo: str = ""
    check: str = ""


def ok(what: str) -> Finding:
    return Finding(Level.OK, what)


def warning(what: str, why: str, todo: str) -> Finding:
    """A finding with which crust works, with fewer features."""
    return Finding(Level.WARNING, what, why, todo)


def error(what: str, why: str, todo: str) -> Finding:
    """A finding with which a part of crust does not work."""
    return Finding(Level.ERROR, what, why, todo)


def tried(look: Callable[[], object], what: str) -> Finding:
    """Ok, unless the look raises an error of crust."""
    try:
        look()
    except errors.CrustError as problem:
        return of_error(problem)
    return ok(what)


def of_error(problem: errors.CrustError) -> Finding:
    """The finding of an error of crust, with its own words."""
    return error(f"[{problem.error_name}] {problem.what}", problem.why, problem.hint)
