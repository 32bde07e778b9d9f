"""What a check finds, and the registry of checks."""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crust.core import errors

if TYPE_CHECKING:  # a node's look at the cluster gives findings
    from crust.cli.doctor.node import Node


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: what was found, why it matters, and what to do. `check` is the name of the check that found it."""

    level: Level
    what: str
    why: str = ""
    todo: str = ""
    check: str = ""


Check = Callable[["Node"], Iterator[Finding]]

CHECKS: dict[str, Check] = {}
"""By name, in the order in which they run."""


def doctor_check(name: str) -> Callable[[Check], Check]:
    """Register a check."""

    def register(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return register


def ok(what: str) -> Finding:
    """As it should be."""
    return Finding(Level.OK, what)


def warning(what: str, why: str, todo: str) -> Finding:
    """crust works, with less."""
    return Finding(Level.WARNING, what, why, todo)


def error(what: str, why: str, todo: str) -> Finding:
    """Something does not work."""
    return Finding(Level.ERROR, what, why, todo)


def tried(look: Callable[[], object], what: str) -> Finding:
    """As it should be, unless the look raises an error of crust."""
    try:
        look()
    except errors.CrustError as problem:
        return of(problem)
    return ok(what)


def of(problem: errors.CrustError) -> Finding:
    """An error, as it says it."""
    return error(f"[{problem.error_name}] {problem.what}", problem.why, problem.hint)
