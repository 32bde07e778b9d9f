"""crust.host.process.arguments: the words that a process gives about itself."""

import subprocess
import sys

from crust.host.process import arguments

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
