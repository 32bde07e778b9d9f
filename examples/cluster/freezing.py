"""Freeze a process: peers see a machine that hangs.

`kill(2)` returns when the signal is queued. On a busy host the process's threads go on until each of them has looked
at it, and may answer meanwhile. So a caller that draws conclusions from a freeze waits until every thread has
stopped.
"""

import os
import signal
from pathlib import Path

_STOPPED = "TtZX"
"""States of proc(5): stopped, traced, and ended."""


def freeze(pid: int) -> None:
    """SIGSTOP, and wait until no thread of the process runs any more. Undone by SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    while not all(_state(thread) in _STOPPED for thread in Path(f"/proc/{pid}/task").iterdir()):
        os.sched_yield()


def _state(task: Path) -> str:
    """The character after the name, which is in parentheses and may have some itself."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
