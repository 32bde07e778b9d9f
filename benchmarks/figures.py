"""What a measurement is, as values: samples, a row that compares them with a baseline, a goal, a report."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

Unit = Literal["ms", "s", "MiB"]


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured values of one thing, in the order in which they were taken."""

    unit: Unit
    values: tuple[float, ...]

    @classmethod
    def of(cls, unit: Unit, values: Sequence[float]) -> Self:
        """Freeze what was collected; there must be something."""
        if not values:
            raise ValueError("nothing was measured")
        return cls(unit, tuple(values))

    @property
    def count(self) -> int:
        """How many."""
        return len(self.values)

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    @property
    def p99(self) -> float:
        """The 99th percentile by nearest rank: a value that was measured; of fewer than 100, the largest."""
        return sorted(self.values)[math.ceil(0.99 * self.count) - 1]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was measured; `against` is the label of the row that it is compared with."""

    label: str
    samples: Samples
    against: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """What the project promised, and what was found."""

    promise: str
    found: str
    met: bool


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark's result, ready to be shown. `method` says how it was measured, `meaning` what follows."""

    name: str
    title: str
    method: str
    rows: tuple[Row, ...]
    meaning: str
    goals: tuple[Goal, ...] = ()

    def ratio(self, row: Row) -> float | None:
        """The row's median over its baseline's; None for a baseline."""
        if not row.against:
            return None
        base = next(each for each in self.rows if each.label == row.against)
        return row.samples.median / base.samples.median


class Result(Protocol):
    """What every benchmark returns: a frozen value that can tell its report."""

    def report(self) -> Report:
        """The figures, in words and rows."""


def shown(value: float) -> str:
    """A number with as many digits as mean something."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def at_most(promise: str, value: float, limit: float, unit: str) -> Goal:
    """A goal that holds when `value` is not above `limit`."""
    return Goal(promise, f"{value:.2f} {unit}", value <= limit)
