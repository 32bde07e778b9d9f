"""A process that the kernel knows and /proc does not show is not seen: never an ended one."""

import subprocess
import sys
from pathlib import Path

import pytest

from crust.host import answers
from crust.host.process import processes

pytestmark = pytest.mark.root

PROGRAM = """
import sys
from crust.host import answers
from crust.host.process import processes
pid, started = map(int, sys.argv[1:])
answer = processes.hold(processes.Process(pid, started)), processes.of(pid)
sys.exit(0 if all(isinstance(one, answers.Unseen) for one in answer) else 1)
"""


def test_process_that_proc_hides_is_not_seen() -> None:
    with subprocess.Popen(["sleep", "inf"]) as child:
        process = answers.seen(processes.of(child.pid))
        assert process is not None
        words = [sys.executable, "-c", PROGRAM, str(process.pid), str(process.started)]
        script = 'mount -t tmpfs none /proc && exec "$@"'
        subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", *words],
            check=True,
            cwd=Path(__file__).parents[4],
        )
        child.kill()


OF_THREAD = """
import os, sys, threading
os.setresuid(65534, 65534, 65534)
def show():
    print(threading.get_native_id(), flush=True)
    sys.stdin.read()
threading.Thread(target=show).start()
"""
HAS_ENDED = """
import sys
from crust.host.process import processes
sys.exit(not processes.has_ended(processes.Process(int(sys.argv[1]), 1)))
"""


def test_number_of_another_users_thread_needs_no_cap_kill() -> None:
    """It was a process's, which has ended: kill(2) says EPERM, and the thread is none."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", OF_THREAD], stdin=pipe, stdout=pipe) as stranger:
        assert stranger.stdout is not None
        number = stranger.stdout.readline().decode().strip()
        less = ("setpriv", "--bounding-set", "-kill", "--inh-caps", "-kill")
        words = [*less, sys.executable, "-c", HAS_ENDED, number]
        subprocess.run(words, check=True, cwd=Path(__file__).parents[4])
