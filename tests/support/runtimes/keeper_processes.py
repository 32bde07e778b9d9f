"""Kills the keeper of a VM and its standby, as an operator or the kernel might."""

import signal
from pathlib import Path

from crust.runtime_handler.blocking import keepers
from tests.support import processes


def kill_all_keepers(socket: Path) -> set[int]:
    """Kill keeper and standby; one that succeeds in between, and the standby that it forked, too."""
    killed: set[int] = set()
    while True:
        try:
            with keepers.connect(socket) as line:
                pids = line.pids
        except keepers.KeeperGone:
            return killed
        with processes.ending(*pids) as (keeper, standby):
            # or the standby succeeds, and forks, before it is killed
            signal.pidfd_send_signal(standby, signal.SIGSTOP)
            for pidfd in (keeper, standby):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        killed.update(pids)
