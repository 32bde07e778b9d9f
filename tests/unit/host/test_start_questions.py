"""A daemon asks its questions about the host once, and shows those without an answer as its problems."""

import errno
import os

from crust.core import errors
from crust.core.supervised import Health
from crust.host import start_questions


def _refused() -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _missing() -> None:
    raise errors.RuntimeFailed("bwrap is not installed", hint="install the package bubblewrap")


async def test_question_without_an_answer_is_a_problem_by_its_name() -> None:
    health = Health()
    questions = (
        ("way to a target (openat2)", _refused),
        ("programs that parse a volume (bubblewrap)", _missing),
        ("mount of a path (statx)", lambda: None),
    )
    await start_questions.report(questions, health)
    assert {part: problem.shown() for part, problem in health.problems.items()} == {
        "way to a target (openat2)": "[NotSeen] cannot see way to a target (openat2): "
        "Function not implemented (ENOSYS)",
        "programs that parse a volume (bubblewrap)": "[RuntimeFailed] bwrap is not installed; "
        "install the package bubblewrap",
    }
    health.check_healthy()  # calls that need no answer go on
    await start_questions.report((("way to a target (openat2)", lambda: None),), health)
    assert "way to a target (openat2)" not in health.problems
