"""The answer to a question about this host: seen, seen to be absent, or not seen.

    answer = processes.of(pid)
    process = answers.seen(answer)          the value, or None if it is absent; raises NotSeen
    match answer: ...                       where "not seen" is no refusal: a message, a health condition

The rule: no answer is never "no". A file that cannot be opened is not an absent file, and a process that cannot be
looked at is not an ended process. `ask` is the one place where an errno becomes an answer: the owner of a question
names the errnos that mean "absent", and every other errno is "not seen".

An answer has no truth value: mypy refuses `if answer` and `answer or …` (truthy-bool), and Python raises. A question
whose answer is a set (users, mounts) gives the whole set or is not seen: a part is never an answer.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NoReturn, TypeAlias, TypeVar, final

from crust.core import errors
from crust.host.process import syscalls

T = TypeVar("T")


class NotSeen(errors.PeerUnavailable):
    """A question about the host got no answer. That is never "nobody", "nothing" or "no".

    Its code is UNAVAILABLE, after which a CO forgets nothing and asks again.
    """


class _NoTruth:
    if not TYPE_CHECKING:  # for mypy the classes have no truth value at all

        def __bool__(self) -> NoReturn:
            raise TypeError("an answer is neither true nor false: use answers.seen, or match it")


@final
@dataclass(frozen=True, slots=True)
class Present(_NoTruth, Generic[T]):
    """Seen."""

    value: T


@final
@dataclass(frozen=True, slots=True)
class Absent(_NoTruth):
    """Seen to be absent: the kernel says that there is none."""


@final
@dataclass(frozen=True, slots=True)
class Unseen(_NoTruth):
    """Not seen, and why."""

    error: NotSeen


Answer: TypeAlias = Present[T] | Absent | Unseen


def ask(
    what: str, question: Callable[[], T], *, absent: Collection[int] = (), needs: str = ""
) -> Answer[T]:
    """The answer to `question`, which raises `OSError` or a `NotSeen` of a question of its own.

    `what` completes "cannot see …". `absent` are the errnos that mean "there is none". `needs` names the privilege or
    the mount without which the kernel does not answer.
    """
    try:
        return Present(question())
    except NotSeen as error:
        return Unseen(error)
    except OSError as err:
        if err.errno in absent:
            return Absent()
        hint = f"it needs {needs}; {errors.ADVICE['NotSeen']}" if needs else ""
        unseen = NotSeen(f"cannot see {what}", why=syscalls.reason(err), hint=hint)
        unseen.__cause__ = err
        return Unseen(unseen)


def seen(answer: "Answer[T]") -> T | None:
    """The value; None if it is absent. Raises `NotSeen`."""
    if isinstance(answer, Unseen):
        raise answer.error
    return answer.value if isinstance(answer, Present) else None
