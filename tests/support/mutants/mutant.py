"""What a broken driver is, and the ways to break one rule of an honest one."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.catalogue import Strength
from tests.support.drivers.fake_driver import Code, Failure, Twist

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


def name_of(number: int) -> str:
    return f"C-{number:03d}"


def by_call(method: str, change: Callable[[int, Any], Any]) -> Callable[[], Twist]:
    """Changes the answers of one RPC; the change is told how many calls came before."""

    def start() -> Twist:
        calls = count()
        return lambda called, _, answer: change(next(calls), answer) if called == method else answer

    return start


def _answering(number: int, name: str, method: str, change: Callable[[Any, Any], Any]) -> Mutant:
    """Changes the answers of one RPC by its request."""

    def twist(called: str, request: Any, answer: Any) -> Any:
        return change(request, answer) if called == method else answer

    return Mutant(name_of(number), f"{method}-{name}", lambda: twist)


def _instead(number: int, method: str, code: Code, shown: str, other: Any) -> Mutant:
    def change(_: Any, answer: Any) -> Any:
        return other if isinstance(answer, Failure) and answer.code is code else answer

    return _answering(number, f"{code.name}-is-{shown}", method, change)


def wrong_code(number: int, method: str, code: Code) -> Mutant:
    """A refusal with another code than the specification's."""
    wrong = Failure(Code.INTERNAL, "something is wrong")
    return _instead(number, method, code, "INTERNAL", wrong)


def not_refused(number: int, method: str, code: Code) -> Mutant:
    """An empty answer where the specification wants a refusal."""
    return _instead(number, method, code, "OK", getattr(csi_pb2, f"{method}Response")())


def altered(number: int, method: str, change: Callable[[Any], object], name: str) -> Mutant:
    def changed(_: Any, answer: Any) -> Any:
        if not isinstance(answer, Failure):
            change(answer)
        return answer

    return _answering(number, name, method, changed)


def refused(
    number: int, method: str, when: Callable[[Any], bool], code: Code = Code.NOT_FOUND
) -> Mutant:
    """A refusal where the specification wants OK."""
    no = Failure(code, "no")
    return _answering(number, "refused", method, lambda asked, done: no if when(asked) else done)


def faulty(number: int, *faults: str) -> Mutant:
    """A driver whose own code is wrong."""
    return Mutant(name_of(number), "-".join(faults), faults=faults)


def says(number: int, message: str, details: bytes, name: str) -> Mutant:
    """Refusals with this message; `{}` in it is the request."""

    def twist(_: str, request: Any, answer: Any) -> Any:
        if not isinstance(answer, Failure):
            return answer
        trailing = (("grpc-status-details-bin", details),) if details else ()
        return Failure(answer.code, message.replace("{}", str(request)), trailing)

    return Mutant(name_of(number), name, lambda: twist)


def refuses_the_retry(number: int, method: str) -> Mutant:
    again = Failure(Code.INTERNAL, "done already")
    twist = by_call(method, lambda before, answer: again if before else answer)
    return Mutant(name_of(number), "refuses-the-retry", twist)


def unknown(request: Any) -> bool:
    return str(request.volume_id).startswith("conformance")
