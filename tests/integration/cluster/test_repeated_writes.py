"""Every write to etcd, carried out twice: its answer was lost, or a member that had been stopped does it late.

A real member with TLS and access by role. The first attempt of each transaction is taken aside between the client
and the member.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from crust.cluster.etcd import connect
from crust.cluster.etcd.client.client import Broken, Client
from crust.cluster.etcd.client.failures import Failure, LeaseGone, Next
from crust.cluster.etcd.client.methods import TXN
from crust.cluster.etcd.controller_side import EtcdControllerSide
from crust.cluster.protocol import Answer, NodeSide, StoreUnavailable
from crust.wire.etcd.v3 import etcd_pb2 as pb
from examples.cluster.etcd import Etcd
from tests.support.cluster.cluster_contract import WAIT_S, announcement, eventually, request
from tests.support.cluster.etcd_cluster import EtcdCluster

_LOST = Failure(StoreUnavailable, "the answer was lost", "", Next.HERE)


class Attempts:
    """The first attempt of each transaction has no answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_carried_out: bool) -> None:
        self.sent: list[pb.TxnRequest] = []
        self._own: list[Any] = []
        attempt = self._attempt = Client.attempt

        async def taken(
            client: Client, member: Any, method: Any, given: Any, timeout_s: float
        ) -> Any:
            if method is not TXN or any(each is given for each in self._own):
                return await attempt(client, member, method, given, timeout_s)
            self._own.append(given)
            self.sent.append(pb.TxnRequest.FromString(given.SerializeToString()))
            if is_carried_out:
                await attempt(client, member, method, given, timeout_s)
            raise Broken(member, _LOST)

        monkeypatch.setattr(Client, "attempt", taken)

    async def arrive(self, etcd: Etcd, *sent: pb.TxnRequest) -> None:
        """Let first attempts arrive, now. They come by a connection of their own."""
        async with connect.client(etcd.settings("controller")) as client:
            for each in sent:
                with contextlib.suppress(LeaseGone):
                    await self._attempt(client, client.members[0], TXN, each, 5.0)


async def _everything(
    etcd: Etcd, cluster: EtcdCluster, check: Callable[[], Awaitable[None]]
) -> None:
    """Each kind of write; `check` is called while the leader leads."""
    node, leader = await cluster.node("n1"), await cluster.controller()
    gone = await cluster.node("n2")
    await gone.announce(announcement("n2", "b"))
    await cluster.leave("n2")
    await node.announce(announcement("n1", "a"))
    await node.announce(announcement("n1", "a", capacity_bytes=5))
    async with leader.lead("c"):
        await leader.place("volume-1", "a")
        await leader.place("volume-2", "a")
        assert (await _asked(leader, node, 1)).response == b"1"
        await leader.unplace("volume-1", "a")
        await leader.retire("n2")
        await eventually(lambda: not _open_in(etcd))
        await check()


async def _asked(leader: EtcdControllerSide, node: NodeSide, number: int) -> Answer:
    asking = asyncio.create_task(leader.ask("n1", request(number), WAIT_S))
    got = await asyncio.wait_for(anext(node.requests()), WAIT_S)
    await node.answer(got, Answer(0, "", str(number).encode()))
    return await asking


def _open_in(etcd: Etcd) -> list[str]:
    keys = etcd.keys()
    return [key for key in keys if "/requests/" in key or "/answers/" in key]


@pytest.mark.parametrize("is_carried_out", [True, False])
async def test_no_write_changes_anything_when_an_attempt_is_carried_out_late(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch, *, is_carried_out: bool
) -> None:
    async with AsyncExitStack() as stack:
        attempts = Attempts(monkeypatch, is_carried_out=is_carried_out)

        async def check() -> None:
            before = _kept(etcd)
            assert "/crust/placements/volume-2" in before
            assert "/crust/placements/volume-1" not in before
            for each in attempts.sent:
                await attempts.arrive(etcd, each)
                assert _kept(etcd) == before, each

        await _everything(etcd, EtcdCluster(etcd, stack), check)
        assert len(attempts.sent) > 9


def _kept(etcd: Etcd) -> str:
    """All keys with their values."""
    return etcd.ctl("get", "--prefix", "/crust/")


async def test_request_that_was_answered_is_not_put_again_by_an_earlier_attempt(
    etcd: Etcd, cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has started since would carry it out: a volume that was deleted would be there again."""
    node, leader = await cluster.node("n1"), await cluster.controller()
    await node.announce(announcement("n1", "a"))
    async with leader.lead("c"):
        attempts = Attempts(monkeypatch, is_carried_out=False)
        await _asked(leader, node, 1)
        await eventually(lambda: not _open_in(etcd))
        await attempts.arrive(etcd, attempts.sent[0])
        assert _open_in(etcd) == []


async def test_leader_that_could_not_be_asked_settles_that_before_it_writes_again(
    etcd: Etcd, cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller got UNAVAILABLE and has called again; what the first call had sent arrives now."""
    node, leader = await cluster.node("n1"), await cluster.controller()
    await node.announce(announcement("n1", "a"))
    async with leader.lead("c"):
        sent: list[Callable[[], Awaitable[Any]]] = []
        attempt = Client.attempt

        async def lost(
            client: Client, member: Any, method: Any, given: Any, timeout_s: float
        ) -> Any:
            if method is TXN:
                sent.append(lambda: attempt(client, member, method, given, 5.0))
                raise Broken(member, Failure(StoreUnavailable, "lost", "", Next.NEVER))
            return await attempt(client, member, method, given, timeout_s)

        with monkeypatch.context() as patched:
            patched.setattr(Client, "attempt", lost)
            with pytest.raises(StoreUnavailable):
                await leader.place("volume-1", "a")
        await leader.place("volume-2", "a")
        await sent[0]()
        assert await leader.placement("volume-1") == ""
        assert await leader.placement("volume-2") == "a"
