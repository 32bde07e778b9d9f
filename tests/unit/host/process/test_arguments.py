"""crust.host.process.arguments: the words that a process gives about itself."""

import os
import subprocess
import sys

import pytest

from crust.host import answers
from crust.host.process import arguments
from tests.support.waiting_processes import no_free_descriptor, waiting

_NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"\\x1b]0;x\\x07\\n[OK] \\xff", 0, 0, 0)
print(flush=True)
sys.stdin.read()
"""


def test_name_that_a_process_chose_is_one_printable_line() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        name = arguments.command_of(process.pid)
        process.communicate()
    assert name == r"\x1b]0;x\x07\n[OK] " + "\ufffd"


def test_name_of_an_ended_process_is_a_question_mark() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert arguments.command_of(process.pid) == "?"


def test_processes_are_found_by_whole_words_of_their_arguments() -> None:
    id_ = f"sandbox-{os.getpid()}-1"  # another run of the tests has processes too
    with waiting("pass", "-id", id_) as process:
        assert list(arguments.having("-id", id_)) == [process]
        assert list(arguments.having("-id", id_[:-1])) == []
        with no_free_descriptor(), pytest.raises(answers.NotSeen, match="EMFILE"):
            arguments.has(process, "-id", id_)
        assert list(arguments.having(id_, "-id")) == []
