"""I/O limits of a deferred volume: in the sandbox that has it, and in the record for the one that has it next.

The handler first, the record after it: a handler that refuses leaves the record as it was. If the record cannot be
written, the handler is told the old limits again. A kill in between leaves a sandbox that obeys limits that nobody
was promised; the caller's retry mends that. A sandbox may begin while the record is written, having read the old one:
so the claim is looked at again afterwards, and a sandbox that is there now and was not told before is told.

The handler must be there even if no sandbox is: limits that are given to one that cannot limit would be ignored in
silence.
"""

import contextlib
import logging

from crust import errors, operations, volumes
from crust.handoff.record import Record
from crust.proxy import handler_admission
from crust.proxy.deferred import DeferredVolumes
from crust.proxy.events import Event, Events
from crust.proxy.handlers import Feature, Handler, Handlers
from crust.proxy.peers import HandlerPeers

_log = logging.getLogger(__name__)


class DeferredIoLimits:
    """Sets limits by target path: one at a time for each, joined by who asks the same, finished when they leave."""

    def __init__(
        self,
        deferred: DeferredVolumes,
        handlers: Handlers,
        peers: HandlerPeers,
        events: Events,
        running: operations.KeyedOperations,
    ) -> None:
        self._deferred = deferred
        self._handlers = handlers
        self._peers = peers
        self._events = events
        self._operations = running

    async def set(self, record: Record, limits: volumes.IoLimits) -> bool:
        """Replace the limits; returns whether a sandbox has the volume, and obeys them already.

        Raises `operations.OperationInProgress`, `handlers.HandlerDisconnected`,
        `handler_admission.UnsupportedByHandler`, `peers.HandlerNotResponding`, and the handler's own error.
        """
        return await self._operations.run(
            ("limits", record.target),
            "RuntimeSetVolumeLimits",
            limits,
            lambda: self._set(record.target, limits),
        )

    async def _set(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> bool:
        record = self._deferred.expect(target.text)
        handler = await self._handlers.owner(record.handler)
        handler_admission.check_limits(handler, limits)
        told = await self._deferred.holder(record)
        if told is not None:
            await self._tell_sandbox(handler, target, limits)
        try:
            await self._deferred.change_limits(target, limits)
        except errors.CrustError:
            if told is not None:
                await self._take_back(handler, record)
            raise
        has_it = await self._deferred.holder(record)
        if has_it not in (None, told):
            await self._catch_up(handler, record, limits)
        self._tell(record, limits, applied=has_it is not None)
        return has_it is not None

    async def _catch_up(self, handler: Handler, record: Record, limits: volumes.IoLimits) -> None:
        """Tell a sandbox that began meanwhile; if it refuses, nothing has changed."""
        try:
            await self._tell_sandbox(handler, record.target, limits)
        except errors.CrustError:
            await self._deferred.change_limits(record.target, record.mount.io_limits)
            raise

    async def _take_back(self, handler: Handler, record: Record) -> None:
        """The reason why the record could not be written is the one to report."""
        with contextlib.suppress(errors.CrustError):
            await self._tell_sandbox(handler, record.target, record.mount.io_limits)

    async def _tell_sandbox(
        self, handler: Handler, target: volumes.TargetPath, limits: volumes.IoLimits
    ) -> None:
        if Feature.IO_LIMITS in handler.features:  # else there are none to take away
            await self._peers.set_limits(handler, target, limits)

    def _tell(self, record: Record, limits: volumes.IoLimits, *, applied: bool) -> None:
        extra = {"volume": str(record.key), "limits": str(limits), "applied": applied}
        _log.info("limits set", extra=extra)
        self._events.emit(Event("limits-set", record.target.text, record.handler, str(limits)))
