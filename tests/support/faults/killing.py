"""kill -9, and a wait until the process is dead. Also a program: `python killing.py PID_FILE`."""

import os
import select
import signal
import sys
from pathlib import Path

TIMEOUT_S = 60.0


def kill(pid_file: Path) -> None:
    """Kill the process, and wait until the last of its threads has closed its files; a dead process is a success."""
    try:
        process = os.pidfd_open(int(pid_file.read_text()))
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        dead = select.poll()
        dead.register(process, select.POLLIN)
        assert dead.poll(TIMEOUT_S * 1000), f"{pid_file.stem} does not die"
    finally:
        os.close(process)


if __name__ == "__main__":
    kill(Path(sys.argv[1]))
