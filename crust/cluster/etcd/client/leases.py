"""A lease, and its renewal.

What a lease keeps is gone some time after the last renewal that reached etcd. When that was, only the moment at which
a renewal was *sent* tells for certain, so the time is counted from there; an answer can be late, and an old leader of
etcd may answer for a lease that the new one has ended. The clock is CLOCK_BOOTTIME, which also counts while the host
sleeps.

Renewals are made on the event loop, a third of the lease's time apart. A loop that is blocked for longer than the
rest of the time loses the lease, and it should: with a thread of its own for renewals a process that hangs would
count as connected, or lead, for ever. A loop that is merely busy renews in time.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from crust.cluster.etcd.client.client import Broken, Client, Stream
from crust.cluster.etcd.client.failures import LeaseGone
from crust.cluster.etcd.client.methods import LEASE_GRANT, LEASE_KEEP_ALIVE, LEASE_REVOKE
from crust.cluster.protocol import StoreUnavailable
from crust.wire.etcd.v3 import etcd_pb2 as pb

_log = logging.getLogger(__name__)

_PAUSE_S = 0.2
_REVOKE_S = 2.0

Renewals = Stream[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse]


def boot_time() -> float:
    """Seconds since the boot, also of the time in which the host slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """A granted lease. It is not renewed unless `keep` runs."""

    def __init__(
        self, client: Client, lease_id: int, ttl_s: int, sent_at: float, now: Callable[[], float]
    ) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._until = sent_at + ttl_s
        self._now = now
        self.id = lease_id

    @property
    def left_s(self) -> float:
        """For how long it holds for certain; 0 when it may have ended."""
        return max(0.0, self._until - self._now())

    async def keep(self) -> None:
        """Renew it until it has ended, then return. Goes to another member where one is silent or away."""
        while self.left_s > 0:
            try:
                async with self._client.stream(
                    LEASE_KEEP_ALIVE, what="the lease is not renewed"
                ) as renewals:
                    await self._renew_on(renewals)
            except LeaseGone:
                self.end()
            except (Broken, StoreUnavailable) as problem:
                _log.info("a lease's renewal is tried again", extra={"error": str(problem)})
                await asyncio.sleep(min(_PAUSE_S, self.left_s))

    def end(self) -> None:
        """Count it as ended."""
        self._until = 0.0

    async def revoke(self) -> None:
        """End it now, if etcd can be reached; else it ends by itself."""
        self.end()
        with contextlib.suppress(StoreUnavailable, LeaseGone):
            request = pb.LeaseRevokeRequest(ID=self.id)
            await self._client.call(LEASE_REVOKE, request, _REVOKE_S, what="a lease is not revoked")

    async def _renew_on(self, renewals: Renewals) -> None:
        answer_s = max(0.5, self._ttl_s / 6)
        while True:
            sent_at = self._now()
            await renewals.write(pb.LeaseKeepAliveRequest(ID=self.id), answer_s)
            answer = await renewals.read(answer_s)
            if answer.TTL <= 0:
                raise LeaseGone
            self._until = sent_at + answer.TTL
            await asyncio.sleep(self._ttl_s / 3)


async def grant(client: Client, ttl_s: int, now: Callable[[], float] = boot_time) -> Lease:
    """A new lease. Raises `StoreUnavailable`."""
    sent_at = now()
    request = pb.LeaseGrantRequest(TTL=ttl_s)
    answer = await client.call(LEASE_GRANT, request, what="no lease is granted")
    return Lease(client, answer.ID, answer.TTL, sent_at, now)
