"""Errors say what failed, why, and what to do."""

from crust.core import errors


def test_message_has_what_why_and_hint() -> None:
    assert str(errors.NotReady("a", why="b", hint="c")) == "a: b; c"
    assert str(errors.NotReady("a", why="b")) == "a: b"
    assert str(errors.NotReady("a", hint="c")) == "a; c"
    assert str(errors.NotReady("a")) == "a"


def test_every_branch_says_what_to_do() -> None:
    for branch in errors.CrustError.__subclasses__():
        if branch.__module__ == "crust.core.errors":
            assert "advice" in vars(branch)
