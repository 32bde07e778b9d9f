"""Errors say what failed, why, and what to do."""

from crust.core import errors
from crust.host import answers


def test_message_has_what_why_and_hint() -> None:
    assert str(errors.NotReady("a", why="b", hint="c")) == "a: b; c"
    assert str(errors.NotReady("a", why="b")) == "a: b"
    assert str(errors.NotReady("a", hint="c")) == "a; c"
    assert str(errors.NotReady("a")) == "a"


def test_error_without_a_hint_says_what_the_table_says() -> None:
    advice = errors.ADVICE["StillDeferred"]
    assert str(errors.NotReady.named("StillDeferred", "a", why="b")) == f"a: b; {advice}"
    assert str(errors.NotReady.named("StillDeferred", "a", hint="c")) == "a; c"
    assert str(answers.NotSeen("a")) == f"a; {errors.ADVICE['NotSeen']}"
