"""Descriptors that a running QEMU holds open until it ends: the claim lock and the exclusive hold on the device.

QEMU closes a descriptor that it merely received (add-fd) when its control connection ends, so a crash of the daemon
would release it. Therefore each descriptor is also opened, through its fd set, as a block node that no device uses.
The node keeps a duplicate of the same open file description, and with it the lock or O_EXCL, until the node is
deleted or QEMU ends. The node's name says which volume it belongs to, so a daemon that adopts the VM finds it.

    hold.<name>.<n>      a block node over /dev/fdset/<id>, without image locking
"""

import asyncio
import os
import stat
from collections import Counter
from collections.abc import Sequence

from examples.kata.vm import block_nodes, qmp

_PREFIX = "hold."


class HeldDescriptors:
    """The descriptors that one VM's QEMU holds."""

    def __init__(self, control: qmp.Qmp, pid: int) -> None:
        self._control = control
        self._pid = pid

    @property
    def keeper_socket(self) -> None:
        """There is no keeper: QEMU holds them."""
        return None

    async def hold(self, name: str, fds: Sequence[int]) -> None:
        """Give duplicates of `fds` to QEMU, under `name`; all or none. Raises QemuCommandFailed, QmpDisconnected."""
        try:
            for number, fd in enumerate(fds):
                await self._hold(f"{_PREFIX}{name}.{number}", fd)
        except BaseException:
            await self.release(name)
            raise

    async def release(self, name: str) -> None:
        """Close QEMU's descriptors under `name`; absent is success. Raises QemuCommandFailed, QmpDisconnected."""
        prefix = f"{_PREFIX}{name}."
        for node in await block_nodes.names(self._control):
            if node.startswith(prefix):
                await self._control.execute("blockdev-del", {"node-name": node})
        command = "query-fdsets"
        for row in qmp.rows(await self._control.execute(command), command):
            fds = qmp.rows(row.get("fds"), command)
            if any(str(fd.get("opaque", "")).startswith(prefix) for fd in fds):
                await self._control.execute("remove-fd", {"fdset-id": row.get("fdset-id")})

    async def held(self) -> dict[str, int]:
        """The number of descriptors that QEMU holds, by name. Raises QemuCommandFailed, QmpDisconnected."""
        nodes = (
            node for node in await block_nodes.names(self._control) if node.startswith(_PREFIX)
        )
        return Counter(node.removeprefix(_PREFIX).rpartition(".")[0] for node in nodes)

    async def holder(self) -> int:
        """The process that holds them."""
        return self._pid

    async def lost(self) -> None:
        """Never: they end with QEMU, and then nothing of it is left that could need them."""
        await asyncio.get_running_loop().create_future()

    async def _hold(self, node: str, fd: int) -> None:
        fdset = await self._control.give(fd, node)
        is_device = stat.S_ISBLK(os.fstat(fd).st_mode)
        arguments = {
            "driver": "host_device" if is_device else "file",
            "node-name": node,
            "filename": f"/dev/fdset/{fdset}",
            # QEMU picks the descriptor by its access mode: the device's is read-only, the lock file's is not.
            "read-only": is_device,
            "locking": "off",
        }
        await self._control.execute("blockdev-add", arguments)
