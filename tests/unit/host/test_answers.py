"""An answer is seen, seen to be absent, or not seen; nothing makes a boolean of it.

Each misuse below carries the code by which mypy refuses it. If mypy accepts one, `make lint` fails: its comment is
unused then (warn_unused_ignores, of the strict configuration). What mypy cannot refuse, Python does.
"""

import errno
import os
from collections.abc import Callable

import pytest

from crust.core import errors
from crust.host import answers
from crust.host.answers import Absent, Answer, NotSeen, Present, Unseen, ask, seen

NAMED = (errno.ENOENT, errno.ESRCH)
OTHERS = (
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EIO,
    errno.ENOSYS,
    errno.ETIMEDOUT,
    errno.ESTALE,
)


def _failing(number: int) -> Callable[[], int]:
    def question() -> int:
        raise OSError(number, os.strerror(number))

    return question


def test_ask_with_a_result_is_present() -> None:
    answer = ask("the number", lambda: 0)
    assert answer == Present(0)
    assert seen(answer) == 0


@pytest.mark.parametrize("number", NAMED)
def test_ask_with_a_named_errno_is_absent(number: int) -> None:
    answer = ask("the number", _failing(number), absent=NAMED)
    assert answer == Absent()
    assert seen(answer) is None


@pytest.mark.parametrize("number", OTHERS)
def test_ask_with_another_errno_is_not_seen(number: int) -> None:
    answer = ask("the number", _failing(number), absent=NAMED, needs="CAP_SYS_PTRACE")
    with pytest.raises(NotSeen, match=errno.errorcode[number]) as refused:
        seen(answer)
    assert isinstance(refused.value, errors.PeerUnavailable)
    assert "cannot see the number" in str(refused.value)
    assert "CAP_SYS_PTRACE" in str(refused.value)


def test_ask_of_unseen_question_keeps_its_reason() -> None:
    inner = NotSeen("cannot see the device", why="EIO")

    def question() -> int:
        raise inner

    assert ask("the number", question) == Unseen(inner)


def test_ask_raises_other_errors() -> None:
    def question() -> int:
        raise errors.Corrupt("the record is damaged")

    with pytest.raises(errors.Corrupt):
        ask("the number", question)


def _if(a: Answer[int]) -> int:
    if a:  # type: ignore[truthy-bool]
        return 1
    return 2


def _not(a: Answer[int]) -> bool:
    return not a  # type: ignore[truthy-bool]


def _or(a: Answer[int]) -> object:
    return a or 3  # type: ignore[truthy-bool]


def _and(a: Answer[int]) -> object:
    return a and 3  # type: ignore[truthy-bool, redundant-expr]


def _conditional(a: Answer[int]) -> int:
    return 1 if a else 2  # type: ignore[truthy-bool, redundant-expr]


def _while(a: Answer[int]) -> None:
    while a:  # type: ignore[truthy-bool]
        pass


def _assert(a: Answer[int]) -> None:
    assert a  # type: ignore[truthy-bool]


def _comprehension(a: Answer[int]) -> object:
    return [each for each in [a] if each]  # type: ignore[truthy-bool, redundant-expr]


def _any(a: Answer[int]) -> bool:
    return any([a])


def _filter(a: Answer[int]) -> object:
    return list(filter(None, [a]))


def _bool(a: Answer[int]) -> bool:
    return bool(a)


@pytest.mark.parametrize("answer", [Present(1), Absent(), Unseen(NotSeen("cannot see it"))])
@pytest.mark.parametrize(
    "misuse",
    [_if, _not, _or, _and, _conditional, _while, _assert, _comprehension, _any, _filter, _bool],
)
def test_answer_has_no_truth_value(
    misuse: Callable[[Answer[int]], object], answer: Answer[int]
) -> None:
    with pytest.raises(TypeError, match="neither true nor false"):
        misuse(answer)


# Python accepts these, so only mypy refuses them; they are not called.


def _returned(a: Answer[int]) -> bool:
    return a  # type: ignore[return-value]


def _value(a: Answer[int]) -> int:
    return a.value  # type: ignore[union-attr]


def _equals(a: Answer[int]) -> bool:
    return a == 3  # type: ignore[comparison-overlap]


def _none(a: Answer[int]) -> int:
    return answers.seen(a)  # type: ignore[return-value]
