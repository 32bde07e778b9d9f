"""What a broken driver is, and the ways to break one rule of an honest one."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from crust.conformance.catalogue import Strength
from crust.wire.csi.v1 import csi_pb2
from tests.support.memory_csi.driver import Twist
from tests.support.memory_csi.state import Code, Refused

INVALID, GONE, EXISTS = Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS
UNREADY, RANGE = Code.FAILED_PRECONDITION, Code.OUT_OF_RANGE


@dataclass(frozen=True)
class Mutant:
    """One broken driver. `strength` is that of the clause that it breaks, where that is not the case's own."""

    case: str
    name: str
    twist: Callable[[], Twist] = field(default=lambda: _honest)
    faults: tuple[str, ...] = ()
    profile: Any = "1.13"
    offline: bool = False
    strength: Strength | None = None


def warned(mutant: Mutant) -> Mutant:
    """It breaks a SHOULD of a case that has a MUST."""
    return replace(mutant, strength=Strength.SHOULD)


def noted(mutant: Mutant) -> Mutant:
    """It differs in what CSI leaves open, in a case that has a stronger clause."""
    return replace(mutant, strength=Strength.BEYOND)


def _honest(_method: str, _request: Any, answer: Any) -> Any:
    return answer


def wrong_code(number: int, method: str, code: Code) -> Mutant:
    """A refusal with another code than the specification's."""

    def twist(called: str, _request: Any, answer: Any) -> Any:
        hit = called == method and isinstance(answer, Refused) and answer.code is code
        return Refused(Code.INTERNAL, "something is wrong") if hit else answer

    return Mutant(name_of(number), f"{method}-{code.name}-is-INTERNAL", lambda: twist)


def not_refused(number: int, method: str, code: Code) -> Mutant:
    """An empty answer where the specification wants a refusal."""
    empty = getattr(csi_pb2, f"{method}Response")

    def twist(called: str, _request: Any, answer: Any) -> Any:
        hit = called == method and isinstance(answer, Refused) and answer.code is code
        return empty() if hit else answer

    return Mutant(name_of(number), f"{method}-{code.name}-is-OK", lambda: twist)


def altered(number: int, method: str, change: Callable[[Any], object], name: str) -> Mutant:
    def twist(called: str, _request: Any, answer: Any) -> Any:
        if called == method and not isinstance(answer, Refused):
            change(answer)
        return answer

    return Mutant(name_of(number), f"{method}-{name}", lambda: twist)


def refused(
    number: int, method: str, when: Callable[[Any], bool], code: Code = Code.NOT_FOUND
) -> Mutant:
    """A refusal where the specification wants OK."""

    def twist(called: str, request: Any, answer: Any) -> Any:
        return Refused(code, "no") if called == method and when(request) else answer

    return Mutant(name_of(number), f"{method}-refused", lambda: twist)


def faulty(number: int, *faults: str) -> Mutant:
    """A driver whose own code is wrong."""
    return Mutant(name_of(number), "-".join(faults), faults=faults)


def repeats_secrets(number: int) -> Mutant:
    """A refusal that repeats what was sent."""

    def twist(_called: str, request: Any, answer: Any) -> Any:
        return Refused(answer.code, f"bad: {request}") if isinstance(answer, Refused) else answer

    return Mutant(name_of(number), "refusals-repeat-requests", lambda: twist)


def name_of(number: int) -> str:
    return f"C-{number:03d}"


def says(number: int, message: str, details: bytes, name: str) -> Mutant:
    def twist(_called: str, _request: Any, answer: Any) -> Any:
        if not isinstance(answer, Refused):
            return answer
        return Refused(answer.code, message, details)

    return Mutant(name_of(number), name, lambda: twist)


def unknown(request: Any) -> bool:
    return str(request.volume_id).startswith("conformance")
