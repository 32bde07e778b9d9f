"""QEMU's control socket, through QEMU's own client library, with crust's errors.

The library raises its own classes, and EOFError from `disconnect` after QEMU died; this module translates both.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path

import qemu.qmp

from examples.kata.vm import faults

ANSWER_S = 20.0

# It logs a traceback for each VM that ends, which is not an error.
logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL)


class Qmp:
    """One connection; QEMU serves one at a time."""

    def __init__(self, client: qemu.qmp.QMPClient) -> None:
        self._client = client
        self._giving = asyncio.Lock()

    @classmethod
    async def connect(cls, path: Path, timeout_s: float = ANSWER_S) -> "Qmp":
        """Connect and negotiate. Raises QmpDisconnected."""
        client = qemu.qmp.QMPClient()
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(str(path))
        except (TimeoutError, qemu.qmp.QMPError, OSError) as err:
            with contextlib.suppress(Exception):
                await client.disconnect()
            raise faults.QmpDisconnected("the greeting", str(err) or "no answer in time") from err
        return cls(client)

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, object] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> object:
        """Run a command. Raises QemuCommandFailed, QmpDisconnected."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client.execute(command, arguments)
        except qemu.qmp.ExecuteError as err:
            raise faults.QemuCommandFailed(command, str(err)) from err
        except (TimeoutError, qemu.qmp.QMPError, EOFError, OSError) as err:
            raise faults.QmpDisconnected(command, str(err) or "no answer in time") from err

    async def give(self, fd: int, opaque: str) -> int:
        """Pass a descriptor into a new fd set; returns the set's id. Raises as `execute`."""
        async with self._giving:  # no other command may come between the descriptor and add-fd
            self._client.send_fd_scm(fd)
            answer = mapping(await self.execute("add-fd", {"opaque": opaque}), "add-fd")
        fdset = answer.get("fdset-id")
        if not isinstance(fdset, int):
            raise faults.QemuCommandFailed("add-fd", "its answer has no fdset-id")
        return fdset

    async def unplug(self, device: str, timeout_s: float) -> bool:
        """device_del, and wait until the guest releases the device; False after the timeout. Raises as `execute`."""
        with self._client.listener(("DEVICE_DELETED",)) as events:
            try:
                await self.execute("device_del", {"id": device})
            except faults.QemuCommandFailed as err:
                # An earlier request is still pending in the guest, or has just completed.
                if "not found" in err.reason:
                    return True
                if "already in the process of unplug" not in err.reason:
                    raise
            try:
                async with asyncio.timeout(timeout_s):
                    async for event in events:
                        if mapping(event["data"], "device_del").get("device") == device:
                            return True
            except TimeoutError:
                return False
        return False

    async def broken(self) -> str:
        """Wait until QEMU stops the machine because its accelerator failed; returns the run state."""
        with self._client.listener(("STOP",)) as events:
            async for _ in events:
                state = mapping(await self.execute("query-status"), "query-status")
                if state.get("status") in ("internal-error", "guest-panicked"):
                    return str(state["status"])
        return "ended"

    async def close(self) -> None:
        """End the connection; idempotent, also after QEMU died."""
        # The library raises here again the error that ended the connection, of any class.
        with contextlib.suppress(Exception):
            await self._client.disconnect()


def mapping(answer: object, command: str) -> dict[str, object]:
    """An answer that must be an object. Raises QemuCommandFailed."""
    if not isinstance(answer, dict):
        raise faults.QemuCommandFailed(command, "its answer is not an object")
    return answer


def rows(answer: object, command: str) -> list[dict[str, object]]:
    """An answer that must be a list of objects. Raises QemuCommandFailed."""
    if not isinstance(answer, list) or not all(isinstance(row, dict) for row in answer):
        raise faults.QemuCommandFailed(command, "its answer is not a list of objects")
    return answer
