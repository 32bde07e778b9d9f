"""Kills the keeper of a VM and its standby, as an operator or the kernel might."""

import os
import select
import signal
from pathlib import Path

from crust.runtime_handler import keepers


def kill_all_keepers(socket: Path) -> set[int]:
    """Kill keeper and standby; one that succeeds in between, and the standby that it forked, too."""
    killed: set[int] = set()
    while True:
        try:
            with keepers.connect(socket) as line:
                pids = line.pids
        except keepers.KeeperGone:
            return killed
        ends = [os.pidfd_open(pid) for pid in reversed(pids)]
        signal.pidfd_send_signal(
            ends[0], signal.SIGSTOP
        )  # or it succeeds, and forks, before it is killed
        for end in reversed(ends):
            signal.pidfd_send_signal(end, signal.SIGKILL)
        for end in ends:
            assert select.select([end], [], [], 20)[0]
            os.close(end)
        killed.update(pids)
