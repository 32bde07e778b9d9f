"""Hold the guest of a deferred volume still, so that what the storage side copies is one moment's content.

Three answers, never two: it is held; there is no sandbox, so nobody writes; or an error. A sandbox whose handler is
away, and one that just begins with the volume, are errors: "not known" is not "nothing to hold".

Nothing is kept here. The time limit runs in the guest: whoever asked, this process and the handler may all die.
"""

from crust import errors, volumes
from crust.handoff.record import Record
from crust.proxy.deferred import DeferredVolumes
from crust.proxy.events import Event, Events
from crust.proxy.handlers import Feature, Handler, Handlers
from crust.proxy.peers import HandlerPeers


class HandlerCannotFreeze(errors.NotReady):
    """The sandbox's handler cannot hold a filesystem still."""

    def __init__(self, target: volumes.TargetPath, handler: str) -> None:
        super().__init__(
            f"the volume at {target} cannot be frozen",
            why=f"a sandbox has it, and runtime handler {handler!r} does not offer FREEZE",
            hint="stop the pod for the time of the snapshot, or use a handler that can",
        )


class DeferredFreeze:
    """Freezes and thaws by record."""

    def __init__(
        self, deferred: DeferredVolumes, handlers: Handlers, peers: HandlerPeers, events: Events
    ) -> None:
        self._deferred = deferred
        self._handlers = handlers
        self._peers = peers
        self._events = events

    async def freeze(self, record: Record, thaw_after_s: int, timeout_s: float | None) -> bool:
        """Hold the filesystem still; False if no sandbox has it.

        Raises `handlers.HandlerDisconnected`, `HandlerCannotFreeze`, `peers.HandlerNotResponding`, and the handler's
        own error.
        """
        if not await self._deferred.is_claimed(record):
            return False
        handler = await self._handlers.owner(record.handler)
        if Feature.FREEZE not in handler.features:
            raise HandlerCannotFreeze(record.target, handler.name)
        try:
            await self._peers.freeze(handler, record.target, thaw_after_s, timeout_s)
        except errors.CrustError:
            if await self._has_ended(record):
                return False
            raise
        self._tell("frozen", record, f"for {thaw_after_s} s at most")
        return True

    async def thaw(self, record: Record, timeout_s: float | None) -> bool:
        """Let the writers go on; whether they were held all the time. A VM that ended meanwhile says nothing: False.

        Raises as `freeze` does; a handler that cannot freeze has frozen nothing.
        """
        if not await self._deferred.is_claimed(record):
            return False
        handler = await self._handlers.owner(record.handler)
        try:
            was_frozen = await self._thaw(handler, record, timeout_s)
        except errors.CrustError:
            if await self._has_ended(record):
                return False
            raise
        self._tell("thawed", record, "" if was_frozen else "it was not frozen any more")
        return was_frozen

    async def _has_ended(self, record: Record) -> bool:
        """Whether the sandbox was just ending when it was seen: who gives a claim up holds its lock a moment too."""
        return not await self._deferred.is_claimed(record)

    async def _thaw(self, handler: Handler, record: Record, timeout_s: float | None) -> bool:
        if Feature.FREEZE not in handler.features:
            return False
        return await self._peers.thaw(handler, record.target, timeout_s)

    def _tell(self, kind: str, record: Record, message: str) -> None:
        self._events.emit(Event(kind, record.target.text, record.handler, message))
