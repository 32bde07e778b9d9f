"""A case: a number that never changes, what it needs, the clauses of the specification, and a docstring, its rule.

A case has at least one clause. The strongest one is the case's own: a failed assertion breaks that. Assertions of a
weaker clause stand in a block `with co.should():` or `with co.beyond():`, and the case goes on after them.

    @case(221, CREATE, NODE)
    @must("NodeUnpublishVolume", "the SP MUST delete the file or directory it created at this path")
    def test_unpublish_leaves_nothing(co: Co) -> None:

MUST stands for MUST, REQUIRED and SHALL, which decide whether a driver is compliant; SHOULD for SHOULD and
RECOMMENDED. `beyond` is what CSI leaves open: the practice of a CO, or crust's own contract.
"""

import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., object])
MARK = "case"
_CLAUSES = "conformance_clauses"


class Strength(enum.StrEnum):
    """How much a clause binds a driver; the strongest first."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    BEYOND = "beyond"


@dataclass(frozen=True, slots=True)
class Clause:
    """A sentence of the specification: the section of spec.md, and what it says, shortened."""

    strength: Strength
    section: str
    gist: str

    def __str__(self) -> str:
        """As a report shows it."""
        return f"{self.strength} · {self.section}: {self.gist}"


@dataclass(frozen=True, slots=True)
class Case:
    """What is known of a case without running it."""

    number: str
    title: str
    rule: str
    needs: tuple[str, ...]
    clauses: tuple[Clause, ...]

    @property
    def strength(self) -> Strength:
        """The strength of its own clause."""
        return min((each.strength for each in self.clauses), key=list(Strength).index)

    def clause(self, strength: Strength) -> Clause:
        """The clause of this strength. Raises LookupError where the case declares none."""
        found = [each for each in self.clauses if each.strength is strength]
        if not found:
            raise LookupError(f"{self.number} declares no clause of strength {strength}")
        return found[0]


CREATE = "controller.CREATE_DELETE_VOLUME"
PUBLISH = "controller.PUBLISH_UNPUBLISH_VOLUME"
READONLY = "controller.PUBLISH_READONLY"
LIST = "controller.LIST_VOLUMES"
LIST_NODES = "controller.LIST_VOLUMES_PUBLISHED_NODES"
GET = "controller.GET_VOLUME"
CAPACITY = "controller.GET_CAPACITY"
SNAPSHOT = "controller.CREATE_DELETE_SNAPSHOT"
LIST_SNAPSHOTS = "controller.LIST_SNAPSHOTS"
GET_SNAPSHOT = "controller.GET_SNAPSHOT"
CLONE = "controller.CLONE_VOLUME"
EXPAND = "controller.EXPAND_VOLUME"
MODIFY = "controller.MODIFY_VOLUME"
GROUP = "group.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT"
METADATA = "plugin.SNAPSHOT_METADATA_SERVICE"
TOPOLOGY = "plugin.VOLUME_ACCESSIBILITY_CONSTRAINTS"
ONLINE = "plugin.ONLINE"
NODE = "node"
FEW_VOLUMES_MAX = 32
"""An attach limit up to this is tried out."""
FEW_VOLUMES = f"node.max_volumes_per_node<={FEW_VOLUMES_MAX}"
STAGE = "node.STAGE_UNSTAGE_VOLUME"
STATS = "node.GET_VOLUME_STATS"
NODE_EXPAND = "node.EXPAND_VOLUME"
MULTI_WRITER = "node.SINGLE_NODE_MULTI_WRITER"
MOUNT_GROUP = "node.VOLUME_MOUNT_GROUP"
DEFER = "node.DEFER_FS_OPS"
BLOCK = "driver.block"
CHECKS_FS_TYPE = "driver.checks-fs-type"
NODE_INFO = "node.info"
EPHEMERAL = "parameters.ephemeral_context"
RESTART = "option.restart-command"


def case(number: int, *needs: str) -> Callable[[F], F]:
    """Number a test function. It is skipped unless the driver has every one of `needs`."""

    def mark(function: F) -> F:
        marked: F = pytest.mark.case(f"C-{number:03d}", needs)(function)
        return marked

    return mark


def must(section: str, gist: str) -> Callable[[F], F]:
    """A clause with MUST, REQUIRED or SHALL."""
    return _clause(Clause(Strength.MUST, section, gist))


def should(section: str, gist: str) -> Callable[[F], F]:
    """A clause with SHOULD or RECOMMENDED."""
    return _clause(Clause(Strength.SHOULD, section, gist))


def beyond(section: str, gist: str) -> Callable[[F], F]:
    """What the specification leaves open."""
    return _clause(Clause(Strength.BEYOND, section, gist))


def is_case(function: object) -> bool:
    """Whether it is marked as a case."""
    return any(each.name == MARK for each in getattr(function, "pytestmark", ()))


def of(function: Callable[..., object]) -> Case:
    """What a marked function says of itself."""
    mark = next(each for each in getattr(function, "pytestmark", ()) if each.name == MARK)
    return Case(
        number=str(mark.args[0]),
        title=function.__name__.removeprefix("test_").replace("_", " "),
        rule=" ".join((inspect.getdoc(function) or "").split()),
        needs=tuple(mark.args[1]),
        clauses=tuple(getattr(function, _CLAUSES, ())),
    )


def _clause(clause: Clause) -> Callable[[F], F]:
    def add(function: F) -> F:
        setattr(function, _CLAUSES, (clause, *getattr(function, _CLAUSES, ())))
        return function

    return add
