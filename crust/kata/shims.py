"""Notices that the shim of a sandbox has ended while its virtual machine goes on: the sandbox is orphaned.

The container engine starts one shim for each sandbox, with `-id SANDBOX` among its arguments, and never a second one.
Without its shim no program can stop the sandbox, and the engine reports it as removed; the machine keeps the volume.
Then the daemon writes it into claim.json, which `crust volumes`, `crust doctor` and `crust end-orphan` read.
"""

import errno
import logging
import math
import os
import select
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from crust.core import errors, volumes
from crust.host import answers
from crust.host.process import arguments, processes
from crust.kata.grants import Grants
from crust.runtime_handler.blocking import keepers

_log = logging.getLogger(__name__)

_PROGRAM = "containerd-shim"
_GRACE_S = 5.0
"""When a sandbox is stopped, machine and shim end at about the same time, in either order."""


@dataclass(eq=False)
class Shims:
    """The shims of the sandboxes that have a keeper. Functions block."""

    _grants: Grants
    _ends: dict[str, int | None] = field(default_factory=dict)
    _gone_s: dict[str, float] = field(default_factory=dict)

    def look_at_shims(self, sandbox_keepers: Mapping[str, keepers.Keeper]) -> None:
        for sandbox_id in self._ends.keys() - sandbox_keepers.keys():
            self._forget(sandbox_id)
        for sandbox_id, keeper in sandbox_keepers.items():
            if sandbox_id not in self._ends:
                self._ends[sandbox_id] = shim_of(sandbox_id)
            end, now_s = self._ends[sandbox_id], time.monotonic()
            if end is not None and not select.select([end], [], [], 0)[0]:
                continue
            if now_s - self._gone_s.setdefault(sandbox_id, now_s) < _GRACE_S:
                continue
            self._forget(sandbox_id)
            self._ends[sandbox_id] = shim_of(sandbox_id)  # the ended one may only have started it
            if self._ends[sandbox_id] is not None:
                continue
            problem = orphaned(sandbox_id, keeper.vm_pid)
            try:
                self._grants.report_orphaned(volumes.SandboxId(sandbox_id), problem)
            except (
                errors.CrustError
            ) as error:  # a later look tries again, unless the machine has ended by then
                _log.warning("an orphaned sandbox is not reported yet", extra={"error": error})
            else:
                _log.error("a virtual machine goes on without its shim", extra={"error": problem})
                self._gone_s[sandbox_id] = math.inf

    def close(self) -> None:
        for sandbox_id in list(self._ends):
            self._forget(sandbox_id)

    def _forget(self, sandbox_id: str) -> None:
        if (end := self._ends.pop(sandbox_id)) is not None:
            os.close(end)
        self._gone_s.pop(sandbox_id, None)


def orphaned(sandbox_id: str, vm_pid: int) -> errors.CrustError:
    return errors.NotReady.named(
        "SandboxOrphaned",
        f"sandbox {sandbox_id} is lost to its container engine",
        why=f"its shim has ended, and its virtual machine, process {vm_pid}, goes on with the volume",
    )


def pids_of(sandbox_id: str) -> Iterator[int]:
    """The processes that are the sandbox's shim. Raises `NotSeen`.

    The sandbox's id among the arguments proves nothing alone: every user can write it there. A shim is root's, as its
    engine, and its program is containerd's by name: `containerd-shim-kata-v2`.
    """
    return filter(_is_shim, arguments.having("-id", sandbox_id))


def _is_shim(pid: int) -> bool:
    def look() -> bool:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            (users,) = (line.split()[1:] for line in file if line.startswith("Uid:"))
        # of /proc/PID itself root is the owner too if the process has forbidden to be traced
        if not {int(user) for user in users} <= {0, os.geteuid()}:
            return False
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(_PROGRAM)

    absent = (errno.ENOENT, errno.ESRCH)
    return bool(answers.seen(answers.ask(f"the program of process {pid}", look, absent=absent)))


def shim_of(sandbox_id: str) -> int | None:
    """A pidfd of the sandbox's shim; None without a shim. Raises `NotSeen`."""
    words = ("-id", sandbox_id)
    for pid in pids_of(sandbox_id):
        process = answers.seen(processes.of(pid))
        shim = answers.seen(processes.hold(process)) if process is not None else None
        if shim is None:
            continue
        if arguments.has(pid, *words):  # the number has not passed to another process
            return shim
        os.close(shim)
    return None
