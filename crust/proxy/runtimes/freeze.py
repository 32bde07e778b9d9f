"""Freezes the filesystem of a deferred volume in its guest, so that the storage side can make a crash-consistent
copy.

There are three results: it is frozen; no sandbox has the volume, so nobody writes; or an error. If the sandbox's
handler is not registered, or the sandbox is just claiming the volume, that is an error: it does not mean that nobody
writes.

The proxy keeps no state for it. The guest keeps the time limit: the caller, this process and the handler may all die.
"""

from crust.core import errors
from crust.handoff.record import Record
from crust.proxy.entries import Entries
from crust.proxy.events import Event, Events
from crust.proxy.runtimes.handlers import Feature, Handler, Handlers
from crust.proxy.runtimes.peers import HandlerPeers


class DeferredFreeze:
    """Freezes and thaws deferred volumes."""

    def __init__(
        self, entries: Entries, handlers: Handlers, peers: HandlerPeers, events: Events
    ) -> None:
        self._entries = entries
        self._handlers = handlers
        self._peers = peers
        self._events = events

    async def freeze(self, record: Record, thaw_after_s: int, timeout_s: float | None) -> bool:
        """Freeze the filesystem; False if no sandbox has the volume.

        Raises `HandlerDisconnected`, `HandlerCannotFreeze`, `peers.HandlerNotResponding`, and the handler's
        own error.
        """
        if not await self._entries.is_claimed(record):
            return False
        handler = await self._handlers.owner(record.handler)
        if Feature.FREEZE not in handler.features:
            raise errors.NotReady.named(
                "HandlerCannotFreeze",
                f"the volume at {record.target} cannot be frozen",
                why=f"a sandbox has it, and runtime handler {handler.name!r} does not offer FREEZE",
                hint="stop the pod during the snapshot, or use a handler that offers FREEZE",
            )
        try:
            await self._peers.freeze(handler, record.target, thaw_after_s, timeout_s)
        except errors.CrustError:
            if await self._has_ended(record):
                return False
            raise
        self._report("frozen", record, f"for {thaw_after_s} s at most")
        return True

    async def thaw(self, record: Record, timeout_s: float | None) -> bool:
        """Thaw; return whether the filesystem was frozen all the time. False also if its VM has ended meanwhile.

        Raises as `freeze` does. For a handler that cannot freeze it returns False.
        """
        if not await self._entries.is_claimed(record):
            return False
        handler = await self._handlers.owner(record.handler)
        try:
            was_frozen = await self._thaw(handler, record, timeout_s)
        except errors.CrustError:
            if await self._has_ended(record):
                return False
            raise
        self._report("thawed", record, "" if was_frozen else "it was no longer frozen")
        return was_frozen

    async def _has_ended(self, record: Record) -> bool:
        """Whether the sandbox has ended since it was seen: while a claim is released, its lock is held for a
        moment.
        """
        return not await self._entries.is_claimed(record)

    async def _thaw(self, handler: Handler, record: Record, timeout_s: float | None) -> bool:
        if Feature.FREEZE not in handler.features:
            return False
        return await self._peers.thaw(handler, record.target, timeout_s)

    def _report(self, kind: str, record: Record, message: str) -> None:
        self._events.emit(Event(kind, record.target.text, record.handler, message))
