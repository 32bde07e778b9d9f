"""What a status means, who waits for which answer, and until when a lease holds: without an etcd."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.cluster.etcd.client import certificates, failures, leases
from crust.cluster.etcd.client.certificates import Files
from crust.cluster.etcd.client.channels import Channels
from crust.cluster.etcd.client.client import Client
from crust.cluster.etcd.client.failures import Failure, LeaseGone, Next
from crust.cluster.etcd.inbox import Inbox
from crust.cluster.etcd.mirror import RequestKey
from crust.cluster.protocol import Answer, LeadershipLost, StoreUnavailable
from crust.wire.etcd.v3 import etcd_pb2 as pb

Code = grpc.StatusCode
DAY = timedelta(days=1)
ONE, TWO = RequestKey("n1", "1"), RequestKey("n1", "2")


def status(code: grpc.StatusCode, text: str) -> grpc.aio.AioRpcError:
    """A status."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)


@pytest.mark.parametrize(
    ("code", "text", "kind", "following"),
    [
        (Code.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", StoreUnavailable, Next.HERE),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", StoreUnavailable, Next.ELSEWHERE),
        (Code.UNAVAILABLE, "etcdserver: no leader", failures.StoreWithoutQuorum, Next.ELSEWHERE),
        (Code.UNAVAILABLE, "etcdserver: request timed out", failures.StoreWithoutQuorum, Next.ELSEWHERE),
        (Code.INTERNAL, "Internal error from Core", StoreUnavailable, Next.ELSEWHERE),
        (Code.RESOURCE_EXHAUSTED, "etcdserver: too many requests", StoreUnavailable, Next.ELSEWHERE),
        (Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", failures.StoreFull, Next.NEVER),
        (Code.PERMISSION_DENIED, "etcdserver: permission denied", failures.StoreAccessDenied, Next.NEVER),
        (Code.INVALID_ARGUMENT, "etcdserver: user name is empty", failures.StoreAccessDenied, Next.NEVER),
        (Code.UNAVAILABLE, "x; CERTIFICATE_VERIFY_FAILED: certificate has expired",
         failures.StoreCertificateRefused, Next.ELSEWHERE),
        (Code.UNAVAILABLE, "Unwrap failed (TSI_DATA_CORRUPTED)", failures.StoreCertificateRefused, Next.ELSEWHERE),
    ],
)  # fmt: skip
def test_status_says_what_failed_and_whether_another_attempt_can_succeed(
    code: grpc.StatusCode, text: str, kind: type[StoreUnavailable], following: Next
) -> None:
    found = failures.failure(status(code, text))
    assert (found.kind, found.next) == (kind, following)


def test_lease_that_is_not_there_is_no_outage() -> None:
    with pytest.raises(LeaseGone):
        failures.failure(status(Code.NOT_FOUND, "etcdserver: requested lease not found"))


def test_error_of_several_members_is_named_by_the_most_telling_and_has_all_reasons() -> None:
    away = Failure(StoreUnavailable, "nobody listens there", "a", Next.ELSEWHERE)
    alone = Failure(failures.StoreWithoutQuorum, "the member knows no leader", "b", Next.ELSEWHERE)
    error = failures.unavailable("x failed", {"m1:1": away, "m2:1": alone})
    assert isinstance(error, failures.StoreWithoutQuorum)
    assert error.why == "m1:1: nobody listens there; m2:1: the member knows no leader"
    assert error.hint == "b"


async def test_answer_is_for_all_who_wait_and_counts_as_read_until_it_is_deleted() -> None:
    box = Inbox()
    with box.waiting(ONE) as first, box.waiting(ONE) as second, box.waiting(TWO) as other:
        box.answer(ONE, Answer(0))
        assert await first == await second == Answer(0)
        assert not other.done()
    assert box.to_delete([ONE, TWO], 10) == {ONE}
    again = asyncio.create_task(box.settled(ONE))
    await asyncio.sleep(0)
    assert not again.done()
    box.deleted()
    await again


async def test_answer_that_nobody_waits_for_stays_for_a_while() -> None:
    now = 0.0
    box = Inbox(keep_s=60, now=lambda: now)
    assert box.to_delete([ONE], 10) == set()
    now = 59.0
    with box.waiting(ONE):
        assert box.to_delete([ONE], 10) == set()
    assert box.to_delete([ONE], 10) == set()  # it was waited for meanwhile
    now = 119.0
    assert box.to_delete([ONE], 10) == {ONE}


async def test_waiters_are_notified_that_the_term_has_ended() -> None:
    box = Inbox()
    with box.waiting(ONE) as answered:
        box.fail(LeadershipLost())
        with pytest.raises(LeadershipLost):
            await answered


class Renewing:
    """A client whose member answers renewals as it is told, by a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.answers: list[tuple[float, int]] = []
        """How long each answer takes, and its TTL."""
        self.asked = asyncio.Event()

    def clock(self) -> float:
        return self.now

    @contextlib.asynccontextmanager
    async def stream(self, *_: object, **__: object) -> AsyncIterator["Renewing"]:
        yield self

    async def write(self, *_: object) -> None:
        pass

    async def read(self, _: float) -> pb.LeaseKeepAliveResponse:
        takes_s, ttl = self.answers.pop(0)
        self.now += takes_s
        self.asked.set()
        return pb.LeaseKeepAliveResponse(TTL=ttl)


def held(client: Renewing, ttl_s: int) -> leases.Lease:
    """A lease that was granted now."""
    fake: Any = client
    return leases.Lease(fake, 1, ttl_s, client.now, client.clock)


async def test_lease_counts_from_the_sending_of_its_last_good_renewal() -> None:
    client = Renewing()
    lease = held(client, 15)
    client.answers = [(4.0, 15)]
    keeping = asyncio.create_task(lease.keep())
    await asyncio.wait_for(client.asked.wait(), 20)
    await asyncio.sleep(0)
    assert lease.left_s == 11.0
    client.now += 11.0
    assert lease.left_s == 0.0
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_lease_that_etcd_does_not_know_any_more_has_ended() -> None:
    client = Renewing()
    lease = held(client, 15)
    client.answers = [(0.0, 0)]
    await lease.keep()
    assert lease.left_s == 0.0


@pytest.mark.parametrize(
    ("begins", "ends", "why"),
    [(-2, -1, "the certificate expired "), (1, 2, "the certificate is valid from "), (-1, 1, "")],
)
def test_certificate_out_of_date_is_a_problem_though_connections_outlive_it(
    begins: int, ends: int, why: str
) -> None:
    channels = Channels(("m1:1",), Files("", "", ""))
    client = Client(channels)
    assert client.refused("x") is None  # none was read yet: it is not followed
    now = certificates.now()
    channels.identity = certificates.Identity(
        *(b"", b"", b"", "controller"), now + begins * DAY, now + ends * DAY, flaws=("unsure",)
    )
    found = client.refused("x failed")
    assert (found is not None) == bool(why)
    assert found is None or (why in found.why and "unsure" not in found.why)
