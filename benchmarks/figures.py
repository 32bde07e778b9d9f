"""A measurement as values: collected samples, rows that compare them with a baseline, goals, a report."""

import math
import statistics
import time
from collections.abc import Awaitable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, Self, TypeVar

Unit = Literal["ms", "s", "MiB", "%"]
Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured values of one thing, in the order in which they were taken."""

    unit: Unit
    values: tuple[float, ...]

    @classmethod
    def of(cls, unit: Unit, values: Sequence[float]) -> Self:
        """The samples of a non-empty sequence."""
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


@dataclass(slots=True)
class Collector(Generic[Key]):
    """Collects the values of several things, by key."""

    values: dict[Key, list[float]] = field(default_factory=dict)

    def add(self, key: Key, value: float) -> None:
        """Add one value."""
        self.values.setdefault(key, []).append(value)

    async def timed(self, key: Key, call: Awaitable[Answer]) -> Answer:
        """Await `call` and add how many milliseconds it took."""
        started_ns = time.perf_counter_ns()
        answer = await call
        self.add(key, (time.perf_counter_ns() - started_ns) / 1e6)
        return answer

    def samples(self, unit: Unit = "ms") -> dict[Key, Samples]:
        """The collected values, in one unit."""
        return {key: Samples.of(unit, values) for key, values in self.values.items()}


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was measured; `against` is the label of the row that it is compared with.

    `is_other`: it is no work of crust, but a comparison with it.
    """

    label: str
    samples: Samples
    against: str = ""
    is_other: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    """An aim of the project, and the measured result."""

    aim: str
    found: str
    met: bool


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark's result. `method` says how it was measured, `meaning` how to read it.

    `if_missed` says what a missed goal means to a node; `costs` is what a node pays, each with its value.
    With `ways` a row's label ends with one of them: the page has a column for each way.
    """

    name: str
    title: str
    method: str
    rows: tuple[Row, ...]
    meaning: str
    goals: tuple[Goal, ...] = ()
    if_missed: str = ""
    costs: tuple[tuple[str, str], ...] = ()
    ways: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for goals that nothing explains."""
        if self.goals and not self.if_missed:
            raise ValueError(f"what does a missed goal of {self.name} mean?")

    def ratio(self, row: Row) -> float | None:
        """The row's median over its baseline's; None for a baseline."""
        if not row.against:
            return None
        base = next(other for other in self.rows if other.label == row.against)
        return row.samples.median / base.samples.median


class Result(Protocol):
    """The result of a benchmark: a frozen value that renders its report."""

    def report(self) -> Report:
        """The figures as a report."""


def shown(value: float) -> str:
    """A number with as many digits as mean something."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def at_most(aim: str, value: float, limit: float, unit: str) -> Goal:
    """A goal that holds when `value` is not above `limit`."""
    return Goal(aim, f"{value:.2f} {unit}", value <= limit)
