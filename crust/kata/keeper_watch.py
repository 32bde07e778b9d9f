"""Notices that a keeper has ended with its standby while the virtual machine lives, and claims again (H-46).

The watch holds a connection to each keeper. When it breaks, the watch connects to the standby. Without a standby the
claims of the machine are free: `Grants.recover` takes them again at once, or ends the machine if another sandbox has
a volume of it, or had it. Only in this case does crust end a machine unasked.

The rule: a machine has ended when the kernel says so of its process. A sandbox that Kata's files do not name, a
volume that cannot be claimed now, no free descriptor: socket and claims stay, and the next look tries again.
"""

import asyncio
import logging

from crust.core import errors, volumes
from crust.host.process import processes, workers
from crust.kata.evidence import Runtimes
from crust.kata.grants import Grants, Sandbox
from crust.kata.shims import Shims
from crust.runtime_handler.blocking import keepers, kept_vm, process_of

_log = logging.getLogger(__name__)

_LOOK_S = 2.0
"""Between two looks for new keepers. The look also notices a keeper that was killed before."""


class KeeperWatch:
    def __init__(self, grants: Grants, runtimes: Runtimes) -> None:
        self._grants, self._runtimes = grants, runtimes
        self._watched: dict[str, keepers.Keeper] = {}
        self._hint = asyncio.Event()
        self._shims = Shims(grants)

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
        self._shims.close()

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
        await workers.run(self._shims.look_at_shims, dict(self._watched))

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
            process = process_of(self._runtimes.of(sandbox_id).vm_of(sandbox_id))
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


def _forget(keeper: keepers.Keeper) -> None:
    asyncio.get_running_loop().remove_reader(keeper.fileno())
    keeper.close()
