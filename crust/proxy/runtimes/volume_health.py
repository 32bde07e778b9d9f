"""NodeGetVolumeHealth (CSI 1.13) of a deferred volume: what the driver reports, and what the guest reports.

The driver knows the device and the storage below it, the guest's kernel knows the filesystem. The driver is called
first. If it reports a problem, that is the answer even if the guest does not respond. If the driver finds nothing and
the guest cannot be asked, the health is not known: that is an error, and not "healthy".
"""

from crust.core import errors, volumes
from crust.handoff.record import Record
from crust.proxy.entries import Entries
from crust.proxy.runtimes.handlers import Feature, Handlers
from crust.proxy.runtimes.peers import HandlerPeers
from crust.rpc.messages import limits
from crust.wire.csi.v1 import csi_pb2

REASON = "ReportedByRuntime"
"""The reason of what a guest reports, for programs."""


class DeferredHealth:
    """Adds the guest's report to the driver's."""

    def __init__(self, entries: Entries, handlers: Handlers, peers: HandlerPeers) -> None:
        self._entries = entries
        self._handlers = handlers
        self._peers = peers

    async def complete(
        self,
        record: Record,
        by_driver: csi_pb2.NodeGetVolumeHealthResponse,
        timeout_s: float | None,
    ) -> csi_pb2.NodeGetVolumeHealthResponse:
        """The driver's response with the guest's condition in it.

        Raises `HandlerDisconnected`, `peers.HandlerNotResponding` and the handler's own error, unless the
        driver has found something.
        """
        try:
            condition = await self._in_guest(record, timeout_s)
        except errors.CrustError:
            if by_driver.volume_health.health_statuses:
                return by_driver
            raise
        if condition is not None and condition.abnormal:
            health = by_driver.volume_health
            health.volume_id = health.volume_id or record.key.volume_id
            health.health_statuses.add(
                status=csi_pb2.DEGRADED,
                reason=REASON,
                message=limits.shortened(condition.message),
            )
        return by_driver

    async def _in_guest(
        self, record: Record, timeout_s: float | None
    ) -> volumes.VolumeCondition | None:
        """None without a sandbox, and if the handler does not report health."""
        if not await self._entries.is_claimed(record):
            return None
        handler = await self._handlers.owner(record.handler)
        if Feature.HEALTH not in handler.features:
            return None
        return await self._peers.health(handler, record.target, timeout_s)
