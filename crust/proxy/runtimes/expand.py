"""RuntimeExpandVolume: grow the filesystem in the sandbox that has the volume, and keep the size in the record.

It is an operation: it outlives the shim's deadline, an identical retry joins it, and it writes the record even if
no caller waits any more. A caller whose time is nearly over gets `StillExpanding` before its own deadline passes.

A kubelet does not retry after FAILED_PRECONDITION until the pod is restarted, so only `OfflineExpansionOnly` has that
code. A temporary condition (the device is still small, the sandbox boots) is UNAVAILABLE (crust/rpc/outcome.py).
"""

import asyncio

from crust.core import errors, operations, volumes
from crust.handoff.record import Record
from crust.host.process import workers
from crust.proxy.entries import Entries
from crust.proxy.runtimes.handlers import Feature, Handlers
from crust.proxy.runtimes.peers import EXPAND_TIMEOUT_S, HandlerPeers
from crust.rpc import outcome
from crust.rpc.messages.crust_v1 import ImplausibleStats

_ANSWER_AT = 0.97
"""The part of the caller's time after which it gets an answer."""


class DeferredExpand:
    """Expands by target path, one at a time for each."""

    def __init__(
        self,
        entries: Entries,
        handlers: Handlers,
        peers: HandlerPeers,
        running: operations.KeyedOperations,
    ) -> None:
        self._entries = entries
        self._handlers = handlers
        self._peers = peers
        self._operations = running

    async def expand(
        self, record: Record, wanted: volumes.CapacityRange, time_left_s: float | None
    ) -> int:
        """Grow it; returns the device's size. Without a sandbox the size is recorded, and the mount grows it.

        Raises `DeviceTooLarge`, `DeviceNotExpanded`, `OfflineExpansionOnly`, `ImplausibleStats`, `StillExpanding`,
        `HandlerDisconnected`, and the handler's own error.
        """
        target = record.target
        answer_in_s = None if time_left_s is None else time_left_s * _ANSWER_AT
        try:
            async with asyncio.timeout(answer_in_s):
                return await self._operations.run(
                    target,
                    "RuntimeExpandVolume",
                    wanted,
                    lambda: self._expand(target, wanted),
                )
        except TimeoutError as error:
            raise errors.OperationPending.named(
                "StillExpanding",
                f"the filesystem of the volume at {target.text} is still growing",
                why="the runtime has not finished in the caller's time",
                hint="retry: the running expansion goes on, and the retry joins it",
            ) from error
        except errors.CrustError as error:
            raise outcome.answer("RuntimeExpandVolume", error, outcome.Residue.NONE) from error

    async def _expand(self, target: volumes.TargetPath, wanted: volumes.CapacityRange) -> int:
        record = self._entries.table.expect(target.text)
        size_bytes = await self._grown(record, wanted)
        if wanted.limit_bytes and size_bytes > wanted.limit_bytes:
            raise errors.OutOfRange.named(
                "DeviceTooLarge",
                f"the volume on {record.shown_source} cannot be kept within {wanted.limit_bytes} bytes",
                why=f"the device has {size_bytes} bytes already",
                hint="raise the limit: a filesystem fills its device",
            )
        if size_bytes < wanted.required_bytes:
            raise errors.NotReady.named(
                "DeviceNotExpanded",
                f"the filesystem on {record.shown_source} cannot grow to {wanted.required_bytes} bytes",
                why=f"the device has {size_bytes} bytes",
                hint="expand the device first (ControllerExpandVolume, NodeExpandVolume of the driver)",
            )
        if await self._entries.is_claimed(record):
            await self._expand_in_sandbox(record, size_bytes, wanted.limit_bytes)
        await self._entries.change_capacity(target, size_bytes)
        return size_bytes

    async def _grown(self, record: Record, wanted: volumes.CapacityRange) -> int:
        """The device's size. That of an image is what the driver has grown it to, and is written first.

        This host cannot see an image's size: the runtime refuses a size that the image does not have.
        """
        if record.image is None:
            return await workers.run(self._entries.devices.size_bytes, record.device)
        size_bytes = max(wanted.required_bytes, record.mount.capacity_bytes)
        if size_bytes > record.mount.capacity_bytes:
            await self._entries.change_capacity(record.target, size_bytes)
        return size_bytes

    async def _expand_in_sandbox(self, record: Record, size_bytes: int, limit_bytes: int) -> None:
        handler = await self._handlers.owner(record.handler)
        if Feature.ONLINE_EXPAND not in handler.features:
            await self._entries.change_capacity(record.target, size_bytes)
            raise errors.NotReady.named(
                "OfflineExpansionOnly",
                f"the filesystem of the volume at {record.target.text} was not grown",
                why=f"runtime handler {record.handler!r} does not offer ONLINE_EXPAND, and a sandbox has it mounted",
                hint="restart the pod: the filesystem grows when it is mounted",
            )
        capacity = volumes.CapacityRange(size_bytes, limit_bytes)
        filled_bytes = await self._peers.expand(handler, record.target, capacity, EXPAND_TIMEOUT_S)
        if not 0 < filled_bytes <= size_bytes:
            raise ImplausibleStats(
                f"a filesystem of {filled_bytes} bytes on {record.shown_source}, which has {size_bytes} bytes"
            )
