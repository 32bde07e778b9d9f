"""A case: one duty of a runtime, with the clauses of specs/handoff.md that demand it."""

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crust import volumes

if TYPE_CHECKING:
    from crust.runtime_handler.conformance.subject import Subject

Body = Callable[["Subject"], Awaitable[None]]


class Strength(enum.Enum):
    """How strongly the clause demands it. Only a broken MUST fails a run."""

    MUST = "MUST"
    SHOULD = "SHOULD"


class BrokenDuty(Exception):
    """The runtime did not do what the clause demands."""


@dataclass(frozen=True, slots=True)
class Case:
    """`needs` is a feature without which the case is skipped; `lacks` one with which it is."""

    number: str
    title: str
    clauses: tuple[str, ...]
    strength: Strength
    body: Body
    needs: volumes.HandlerFeature | None = None
    lacks: volumes.HandlerFeature | None = None

    def skipped(self, offered: frozenset[volumes.HandlerFeature]) -> str:
        """Why the case does not apply to the runtime; empty if it does."""
        if self.needs is not None and self.needs not in offered:
            return f"{self.needs.name} is not offered"
        if self.lacks is not None and self.lacks in offered:
            return f"{self.lacks.name} is offered"
        return ""


CASES: list[Case] = []


def case(
    number: str,
    title: str,
    *clauses: str,
    strength: Strength = Strength.MUST,
    needs: volumes.HandlerFeature | None = None,
    lacks: volumes.HandlerFeature | None = None,
) -> Callable[[Body], Body]:
    """Register the decorated function as a case."""

    def register(body: Body) -> Body:
        CASES.append(Case(number, title, clauses, strength, body, needs, lacks))
        return body

    return register


def expect(condition: object, otherwise: str) -> None:
    """Raise `BrokenDuty` unless the condition holds."""
    if not condition:
        raise BrokenDuty(otherwise)
