"""A daemon asks its questions about the host once, and shows those without an answer as its problems."""

import errno
import os
import subprocess
import sys
from pathlib import Path

from crust.core import errors
from crust.core.supervised import Health
from crust.host import start_questions

_ASKS = """
import sys
from crust.host import start_questions
from crust.host.block import signatures

def probe(path):
    print("asked", flush=True)
    sys.stdin.read()

signatures.probe = probe
name, ask = start_questions.CONFINED
ask()
"""


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
        f"Function not implemented (ENOSYS); {errors.ADVICE['NotSeen']}",
        "programs that parse a volume (bubblewrap)": "[RuntimeFailed] bwrap is not installed; "
        "install the package bubblewrap",
    }
    health.check_healthy()  # calls that need no answer go on
    await start_questions.report((("way to a target (openat2)", lambda: None),), health)
    assert "way to a target (openat2)" not in health.problems


def test_daemon_that_is_killed_while_it_asks_leaves_no_file(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", _ASKS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as daemon:  # fmt: skip
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "asked\n"
        daemon.kill()
    assert list(tmp_path.iterdir()) == []
