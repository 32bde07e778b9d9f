"""Changes the I/O limits of a deferred volume: in the sandbox that has it, and in its record for the next sandbox.

The handler gets the limits first, then the record is written: if the handler refuses, the record stays as it was. If
the record cannot be written, the handler gets the old limits again. If the proxy is killed in between, the sandbox
has limits that were never confirmed to the caller; the caller's retry corrects this. A sandbox may claim the volume
and read the old record while the new one is written: so the claim is checked again afterwards, and a new sandbox gets
the limits too.

The handler must be registered even if no sandbox has the volume: limits for a handler that cannot enforce them would
be silently ignored.
"""

import contextlib
import logging

from crust.core import errors, operations, volumes
from crust.handoff.record import Record
from crust.proxy.entries import Entries
from crust.proxy.events import Event, Events
from crust.proxy.runtimes import handler_admission
from crust.proxy.runtimes.handlers import Feature, Handler, Handlers
from crust.proxy.runtimes.peers import HandlerPeers

_log = logging.getLogger(__name__)


class DeferredIoLimits:
    """Sets limits by target path, as one operation per target: an identical request joins it, and it outlives its
    callers.
    """

    def __init__(
        self,
        entries: Entries,
        handlers: Handlers,
        peers: HandlerPeers,
        events: Events,
        running: operations.KeyedOperations,
    ) -> None:
        self._entries = entries
        self._handlers = handlers
        self._peers = peers
        self._events = events
        self._operations = running

    async def set(self, record: Record, limits: volumes.IoLimits) -> bool:
        """Replace the limits; returns whether a sandbox has the volume, so that they are in force already.

        Raises `operations.OperationInProgress`, `HandlerDisconnected`,
        `handler_admission.UnsupportedByHandler`, `peers.HandlerNotResponding`, and the handler's own error.
        """
        return await self._operations.run(
            record.target,
            "RuntimeSetVolumeLimits",
            limits,
            lambda: self._set(record.target, limits),
        )

    async def _set(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> bool:
        record = self._entries.table.expect(target.text)
        handler = await self._handlers.owner(record.handler)
        handler_admission.check_limits(handler, limits)
        holder = await self._entries.holder(record)
        if holder is not None:
            await self._set_in_sandbox(handler, target, limits)
        try:
            await self._entries.change_limits(target, limits)
        except errors.CrustError:
            if holder is not None:
                await self._restore(handler, record)
            raise
        current = await self._entries.holder(record)
        if current not in (None, holder):
            await self._catch_up(handler, record, limits)
        self._report(record, limits, applied=current is not None)
        return current is not None

    async def _catch_up(self, handler: Handler, record: Record, limits: volumes.IoLimits) -> None:
        """Set the limits in a sandbox that has claimed the volume meanwhile; restore the record if its handler
        refuses.
        """
        try:
            await self._set_in_sandbox(handler, record.target, limits)
        except errors.CrustError:
            await self._entries.change_limits(record.target, record.mount.io_limits)
            raise

    async def _restore(self, handler: Handler, record: Record) -> None:
        """Restore the old limits. Its errors are ignored: the caller gets the error of the record."""
        with contextlib.suppress(errors.CrustError):
            await self._set_in_sandbox(handler, record.target, record.mount.io_limits)

    async def _set_in_sandbox(
        self, handler: Handler, target: volumes.TargetPath, limits: volumes.IoLimits
    ) -> None:
        if Feature.IO_LIMITS in handler.features:  # otherwise there are no limits to remove
            await self._peers.set_limits(handler, target, limits)

    def _report(self, record: Record, limits: volumes.IoLimits, *, applied: bool) -> None:
        extra = {"volume": str(record.key), "limits": str(limits), "applied": applied}
        _log.info("limits set", extra=extra)
        self._events.emit(Event("limits-set", record.target.text, record.handler, str(limits)))
