"""Connections to etcd's members: for each member one for calls, and one for watches and leases.

One address per channel: with several, gRPC checks the member's certificate against the wrong name. Watches and leases
have connections of their own, because in etcd 3.4 before 3.4.25 a large answer starves them on the same one.

gRPC keeps the certificates that a channel was made with. So the files are looked at every few seconds, and when they
have changed, all channels are recreated: calls under way finish on the old ones, watches and leases break and begin
again on the new ones. Files that do not fit together, as while they are being replaced, are not taken. An etcd that
refuses an expired certificate accepts the new one at the next attempt.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc.aio

from crust import metrics
from crust.cluster.etcd.client import certificates
from crust.cluster.etcd.client.certificates import Files, Identity
from crust.cluster.protocol import StoreUnavailable

_log = logging.getLogger(__name__)

RELOAD_S = 5.0
_FINISH_S = 30.0
"""How long calls on channels that were replaced may go on."""

OPTIONS: tuple[tuple[str, int], ...] = (
    # An idle watch notices a dead connection within 15 s. Without the third option it takes 45 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Without these gRPC waits up to two minutes after an outage.
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # which is also the time limit of one attempt
    ("grpc.max_reconnect_backoff_ms", 3_000),
    ("grpc.max_receive_message_length", -1),  # a listing is not split
    ("grpc.use_local_subchannel_pool", 1),  # else both channels of a member share a connection
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True)
class Member:
    """One member, by its address."""

    address: str
    calls: grpc.aio.Channel
    streams: grpc.aio.Channel


class Channels:
    """The members' channels, and the certificates that they were made with."""

    def __init__(self, endpoints: Sequence[str], files: Files) -> None:
        self._endpoints = tuple(endpoints)
        self._files = files
        self._reported: tuple[str, str] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.identity: Identity | None = None
        self.members: tuple[Member, ...] = ()
        self.problem: StoreUnavailable | None = None
        """Why the files could not be used when they were last read."""

    @contextlib.asynccontextmanager
    async def opened(self, reload_s: float = RELOAD_S) -> AsyncIterator[None]:
        """Open, and follow the files, inside the block. Files that cannot be used now are tried again."""
        metrics.export(*metrics.CLUSTER)
        await self.reload()
        follower = asyncio.create_task(self._follow(reload_s), name="etcd certificates")
        try:
            yield
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)
            for each in self._closing:
                each.cancel()
            await asyncio.gather(*self._closing, return_exceptions=True)
            await _close(self.members, grace_s=None)

    async def reload(self) -> None:
        """Read the files; if they have changed, recreate the channels."""
        try:
            found = await asyncio.to_thread(certificates.read, self._files)
        except StoreUnavailable as problem:
            self._refuse(problem)
            return
        if found == self.identity:
            self.problem = None
            self._report(found)
            return
        if self.identity is not None and certificates.KEY_DIFFERS in found.flaws:
            return  # one of the two files is still the old one
        self._use(found)

    def _refuse(self, problem: StoreUnavailable) -> None:
        if str(problem) != str(self.problem):
            _log.error("the store's certificates cannot be used", extra={"error": problem})
        self.problem = problem

    def _use(self, found: Identity) -> None:
        replaced = self.members
        self.problem = None
        self.identity = found
        self.members = tuple(_member(each, found.credentials()) for each in self._endpoints)
        metrics.store_certificate_expiry.set(found.not_after.timestamp())
        self._report(found)
        if replaced:
            task = asyncio.create_task(_close(replaced, grace_s=_FINISH_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _report(self, found: Identity) -> None:
        """Log what there is to say of the certificate, once, and again when that has changed."""
        at = certificates.now()
        expires = found.not_after.isoformat()
        why = "; ".join(found.problems(at))
        soon = "the store's client certificate expires soon" if found.expires_soon(at) else ""
        message = "the store may refuse this certificate" if why else soon
        if self._reported != (message, expires):
            self._reported = (message, expires)
            level = logging.WARNING if message else logging.INFO
            fields = {"user": found.user, "expires": expires} | ({"why": why} if why else {})
            _log.log(level, message or "the store's client certificate was read", extra=fields)

    async def _follow(self, reload_s: float) -> None:
        while True:
            await asyncio.sleep(reload_s)
            try:
                await self.reload()
            except Exception:
                _log.exception("the store's certificates were not looked at")


def _member(address: str, credentials: grpc.ChannelCredentials) -> Member:
    return Member(address, *(grpc.aio.secure_channel(address, credentials, OPTIONS) for _ in "12"))


async def _close(members: Sequence[Member], grace_s: float | None) -> None:
    """Streams never end by themselves, so they get no grace."""
    await asyncio.gather(*(each.streams.close() for each in members))
    await asyncio.gather(*(each.calls.close(grace_s) for each in members))
