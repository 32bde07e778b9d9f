"""A worker of pytest-xdist that dies: the signal that ended it, and what the kernel logged of it.

A library's own thread blocks all signals (librados does), so no handler in the process prints where it failed.
"""

import re
import signal
import subprocess
from contextlib import suppress
from typing import Any

_TELLING = re.compile(r"segfault|general protection|traps:|Out of memory|oom-kill|Killed process")
_LINES = 10
_END_S = 30.0


def obituary(worker: Any) -> str:
    """One line for the end of a worker's process, and the last telling lines of the kernel's log."""
    process, end = worker.gateway._io.popen, "it closed its connection, and runs"
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(_END_S)
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    kernel = subprocess.run(("dmesg",), capture_output=True, text=True, check=False).stdout
    lines = [line for line in kernel.splitlines() if _TELLING.search(line)][-_LINES:]
    return "\n".join([f"{worker.gateway.id} ended: {end}", *lines])
