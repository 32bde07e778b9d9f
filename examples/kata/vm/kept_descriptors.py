"""The descriptors of one VM's claims, in the hands of its keeper instead of QEMU.

The way of a runtime whose hypervisor takes no descriptors (`crust.runtime_handler.blocking.keepers`), shown with
QEMU, which does. The same interface as `descriptors.HeldDescriptors`; the socket is in the VM's directory. Only
`begin` starts a keeper: when the VM starts, and after keeper and standby have both ended
(`crust.runtime_handler.blocking.kept_vm`).
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from crust.runtime_handler.blocking import Process, keepers

T = TypeVar("T")

_AGAIN_S = 1.0


class KeptDescriptors:
    """The descriptors that one VM's keeper holds. One connection for each call: each finds the present keeper."""

    def __init__(self, socket: Path, vm: Process) -> None:
        self._socket = socket
        self._vm = vm

    @property
    def keeper_socket(self) -> Path:
        """Where the keeper serves."""
        return self._socket

    async def begin(self) -> None:
        """Start the keeper of a new VM. Raises the errors of `keepers.start`."""
        await asyncio.to_thread(lambda: keepers.start(self._socket, self._vm).close())

    async def hold(self, name: str, fds: Sequence[int]) -> None:
        """Give duplicates of `fds` to the keeper, under `name`. Raises KeeperGone, KeeperNotResponding."""
        await self._ask(lambda keeper: keeper.hold(name, fds))

    async def release(self, name: str) -> None:
        """Close the keeper's descriptors under `name`; absent is success. Raises KeeperGone, KeeperNotResponding."""
        await self._ask(lambda keeper: keeper.release(name))

    async def held(self) -> dict[str, int]:
        """The number of descriptors that it holds, by name. Raises KeeperGone, KeeperNotResponding."""
        return await self._ask(lambda keeper: keeper.held())

    async def holder(self) -> int:
        """The process that holds them. Raises KeeperGone, KeeperNotResponding."""
        return await self._ask(lambda keeper: keeper.pid)

    async def lost(self) -> None:
        """Wait until keeper and standby have both ended."""
        while True:
            try:
                with await asyncio.to_thread(keepers.connect, self._socket) as keeper:
                    await _readable(keeper.fileno())
            except keepers.KeeperGone:
                return
            except keepers.KeeperNotResponding:  # stopped: it holds
                await asyncio.sleep(_AGAIN_S)

    async def _ask(self, question: Callable[[keepers.Keeper], T]) -> T:
        def ask() -> T:
            with keepers.connect(self._socket) as keeper:
                return question(keeper)

        return await asyncio.to_thread(ask)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    seen = asyncio.Event()
    loop.add_reader(fd, seen.set)
    try:
        await seen.wait()
    finally:
        loop.remove_reader(fd)
