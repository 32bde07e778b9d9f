"""Notices that a keeper has ended with its standby while the virtual machine lives, and claims again (H-46).

The watch holds a connection to each keeper. When it breaks, the watch connects to the standby. Without a standby the
claims of the machine are free: `Grants.recover` takes them again at once, or ends the machine, so that it writes no
more. Only in this case does crust end a machine unasked.
"""

import asyncio
import contextlib
import logging
import os
import select

from crust.core import errors, volumes
from crust.host.process import workers
from crust.kata.evidence import Runtimes, VmUnknown
from crust.kata.grants import Grants, Sandbox
from crust.kata.shims import Shims
from crust.runtime_handler import keepers, kept_vm

_log = logging.getLogger(__name__)

_LOOK_S = 2.0
"""Between two looks for new keepers. The look also notices a keeper that was killed before."""


class KeeperWatch:
    """The keepers of this node's sandboxes."""

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
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._hint.wait()
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
            if watched is not None and not _has_ended(watched):
                continue
            if watched is not None:
                _forget(self._watched.pop(sandbox_id))
            keeper = await workers.run(
                self._found, sandbox_id, None if watched is None else watched.vm_pid
            )
            if keeper is not None:
                self._watched[sandbox_id] = keeper
                fd = keeper.fileno()
                asyncio.get_running_loop().add_reader(fd, self._noticed, fd)
        await workers.run(self._shims.look_at_shims, dict(self._watched))

    def _noticed(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)  # it stays readable
        self._hint.set()

    def _found(self, sandbox_id: str, known_pid: int | None) -> keepers.Keeper | None:
        """The sandbox's keeper, after its claims were recovered if it had ended; None if the machine has ended."""
        try:
            return keepers.connect(self._grants.socket(sandbox_id))
        except keepers.KeeperGone:
            return self._recovered(sandbox_id, known_pid)
        except keepers.KeeperNotResponding as error:
            _log.error("a keeper does not answer", extra={"error": error})
            return None

    def _recovered(self, sandbox_id: str, known_pid: int | None) -> keepers.Keeper | None:
        socket = self._grants.socket(sandbox_id)
        try:
            pid = known_pid or self._runtimes.of(sandbox_id).vm_of(sandbox_id)
            self._grants.recover(Sandbox(volumes.SandboxId(sandbox_id), pid))
            keeper = keepers.connect(socket)
        except (keepers.KeeperGone, errors.NotFound, VmUnknown, kept_vm.VmKilled) as error:
            if isinstance(error, kept_vm.VmKilled):
                _log.error("a virtual machine was ended", extra={"error": error})
            self._grants.hide_unclaimed()  # the machine has ended
            with contextlib.suppress(FileNotFoundError):
                os.unlink(socket)
            return None
        except errors.CrustError as error:
            _log.error("the claims of a sandbox could not be taken again", extra={"error": error})
            return None
        _log.warning("the claims of a sandbox were taken again", extra={"sandbox": sandbox_id})
        return keeper


def _forget(keeper: keepers.Keeper) -> None:
    asyncio.get_running_loop().remove_reader(keeper.fileno())
    keeper.close()


def _has_ended(keeper: keepers.Keeper) -> bool:
    return bool(select.select([keeper], [], [], 0)[0])
