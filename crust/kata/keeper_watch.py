"""Notices that a keeper has ended with its standby while the virtual machine lives, and claims again (H-46).

The watch holds a connection to each keeper. When it breaks, the watch connects to the standby. Without a standby the
claims of the machine are free: `Grants.recover` takes them again at once, or ends the machine if another sandbox has
a volume of it, or had it. Only in this case does crust end a machine unasked.

The rule: a machine has ended when the kernel says so of its process. A sandbox that Kata's files do not name, a
volume that cannot be claimed now, no free descriptor: socket and claims stay, and the next look tries again.

It also notices that the shim of a sandbox has ended while its virtual machine goes on: the sandbox is orphaned. The
container engine starts one shim for each sandbox, with `-id SANDBOX` among its arguments, and never a second one.
Without its shim no program can stop the sandbox, and the engine reports it as removed; the machine keeps the volume.
Then the daemon writes it into claim.json, which `crust volumes`, `crust doctor` and `crust end-orphan` read.
"""

import asyncio
import errno
import logging
import math
import os
import select
import time
from collections.abc import Iterator, Mapping

from crust.core import errors, volumes
from crust.host import answers
from crust.host.process import arguments, processes, workers
from crust.kata.evidence import KataBuilds
from crust.kata.grants import Grants, Sandbox
from crust.runtime_handler.blocking import keepers, kept_vm, process_of

_log = logging.getLogger(__name__)

_LOOK_S = 2.0
"""Between two looks for new keepers. The look also notices a keeper that was killed before."""
_SHIM = "containerd-shim"
_GRACE_S = 5.0
"""When a sandbox is stopped, machine and shim end at about the same time, in either order."""


class KeeperWatch:
    def __init__(self, grants: Grants, builds: KataBuilds) -> None:
        self._grants, self._builds = grants, builds
        self._watched: dict[str, keepers.Keeper] = {}
        self._hint = asyncio.Event()
        self._shims: dict[str, int | None] = {}
        """A pidfd of the shim of each sandbox that has a keeper; None without a shim."""
        self._shim_gone_s: dict[str, float] = {}

    async def keep(self) -> None:
        """Look until cancelled."""
        try:
            while True:
                self._hint.clear()
                await self.look_at_keepers()
                timer = asyncio.get_running_loop().call_later(_LOOK_S, self._hint.set)
                await self._hint.wait()
                timer.cancel()
        finally:
            self.close()

    def close(self) -> None:
        """End the connections; no claim ends with them."""
        for keeper in self._watched.values():
            _forget(keeper)
        self._watched.clear()
        for sandbox_id in list(self._shims):
            self._forget_shim(sandbox_id)

    async def look_at_keepers(self) -> None:
        """Look once: connect to new keepers, and recover the claims of ended ones."""
        for sandbox_id in await workers.run(self._grants.sandbox_ids):
            watched = self._watched.get(sandbox_id)
            if watched is not None and not processes.is_over(watched.fileno()):
                continue
            if watched is not None:
                _forget(self._watched.pop(sandbox_id))
            try:
                keeper = await workers.run(self._found, sandbox_id)
            except errors.CrustError as error:  # the next look tries again
                extra = {"sandbox": sandbox_id, "error": error}
                _log.error("the claims of a sandbox are not seen, or not taken again", extra=extra)
                continue
            if keeper is not None:
                self._watched[sandbox_id] = keeper
                fd = keeper.fileno()
                asyncio.get_running_loop().add_reader(fd, self._noticed, fd)
        await workers.run(self._look_at_shims, dict(self._watched))

    def _noticed(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)  # it stays readable
        self._hint.set()

    def _found(self, sandbox_id: str) -> keepers.Keeper | None:
        """The sandbox's keeper, which holds all claims of its machine; None once the machine has ended.

        Also of a keeper that runs: a daemon may have been killed half way through a recovery, or an earlier look may
        have got some of the claims.
        """
        process = self._grants.machine(sandbox_id)
        if process is None:  # nothing of crust names it any more: the machine by Kata's word
            process = process_of(self._builds.of(sandbox_id).vm_of(sandbox_id))
        has_ended = processes.has_ended(process)
        if not has_ended:
            try:
                self._grants.recover(Sandbox(volumes.SandboxId(sandbox_id), process))
            except kept_vm.VmKilled as error:
                _log.error("a virtual machine was ended", extra={"error": error})
                has_ended = True
            except errors.NotFound:
                has_ended = processes.has_ended(process)
                if not has_ended:
                    raise
        if has_ended:
            self._grants.hide_unclaimed()
            self._grants.forget(sandbox_id)
            return None
        return keepers.connect(self._grants.socket(sandbox_id))

    def _look_at_shims(self, sandbox_keepers: Mapping[str, keepers.Keeper]) -> None:
        """Blocks."""
        for sandbox_id in self._shims.keys() - sandbox_keepers.keys():
            self._forget_shim(sandbox_id)
        for sandbox_id, keeper in sandbox_keepers.items():
            if sandbox_id not in self._shims:
                self._shims[sandbox_id] = shim_of(sandbox_id)
            end, now_s = self._shims[sandbox_id], time.monotonic()
            if end is not None and not select.select([end], [], [], 0)[0]:
                continue
            if now_s - self._shim_gone_s.setdefault(sandbox_id, now_s) < _GRACE_S:
                continue
            self._forget_shim(sandbox_id)
            self._shims[sandbox_id] = shim_of(sandbox_id)  # the ended one may only have started it
            if self._shims[sandbox_id] is not None:
                continue
            problem = orphaned(sandbox_id, keeper.vm_pid)
            try:
                self._grants.report_orphaned(volumes.SandboxId(sandbox_id), problem)
            except errors.CrustError as error:
                # a later look tries again, unless the machine has ended by then
                _log.warning("an orphaned sandbox is not reported yet", extra={"error": error})
            else:
                _log.error("a virtual machine has lost Kata's shim", extra={"error": problem})
                self._shim_gone_s[sandbox_id] = math.inf

    def _forget_shim(self, sandbox_id: str) -> None:
        if (end := self._shims.pop(sandbox_id)) is not None:
            os.close(end)
        self._shim_gone_s.pop(sandbox_id, None)


def _forget(keeper: keepers.Keeper) -> None:
    asyncio.get_running_loop().remove_reader(keeper.fileno())
    keeper.close()


def orphaned(sandbox_id: str, vm_pid: int) -> errors.CrustError:
    return errors.NotReady.named(
        "SandboxOrphaned",
        f"sandbox {sandbox_id} is lost to its container engine",
        why=f"Kata's shim for it has ended, and its virtual machine, process {vm_pid}, goes on with the volume",
    )


def shims_of(sandbox_id: str) -> Iterator[int]:
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
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(_SHIM)

    absent = (errno.ENOENT, errno.ESRCH)
    return bool(answers.seen(answers.ask(f"the program of process {pid}", look, absent=absent)))


def shim_of(sandbox_id: str) -> int | None:
    """A pidfd of the sandbox's shim; None without a shim. Raises `NotSeen`."""
    words = ("-id", sandbox_id)
    for pid in shims_of(sandbox_id):
        process = answers.seen(processes.of(pid))
        shim = answers.seen(processes.hold(process)) if process is not None else None
        if shim is None:
            continue
        if arguments.has(pid, *words):  # the number has not passed to another process
            return shim
        os.close(shim)
    return None
