"""What every store for a cluster keeps to: run against the one in memory and against each real one.

A test module makes a subclass of `StoreContract` and a fixture `cluster`, a `Cluster`. What a store tells without
being asked (announcements) may take a moment to arrive: `eventually` waits for it.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import pytest

from crust.cluster import retirement
from crust.cluster.protocol import (
    Announcement,
    Answer,
    ControllerSide,
    LeadershipLost,
    NodeAbsent,
    NodeSide,
    Request,
    StoreUnavailable,
)

WAIT_S = 60.0


class Cluster(Protocol):
    """A store that is empty at the start of a test, and its connections, which last until the end of the test."""

    async def node(self, node_id: str) -> NodeSide:
        """A connection of a node."""
        ...

    async def leave(self, node_id: str) -> None:
        """End the node's connections, as a stop of its driver does."""
        ...

    async def controller(self, name: str) -> ControllerSide:
        """A connection of a controller."""
        ...


def announcement(node_id: str, pool_id: str = "", **but: Any) -> Announcement:
    """An announcement of a node with 1 GiB free."""
    said = {
        "node_id": node_id,
        "pool_id": pool_id or f"pool-of-{node_id}",
        "segments": {"crust.dev/node": node_id},
        "capacity_bytes": 1 << 30,
        "maximum_bytes": 1 << 30,
        "volumes": 0,
        "max_volumes": 0,
        "is_ready": True,
        "boot": "1",
    }
    return Announcement(**{**said, **but})


async def eventually(check: Callable[[], bool]) -> None:
    """Wait until `check` is true, which nothing tells."""
    async with asyncio.timeout(WAIT_S):
        while not check():  # noqa: ASYNC110 - a store tells nobody that its index changed
            await asyncio.sleep(0.01)


def request(number: int = 1, message: bytes = b"m") -> Request:
    """A request."""
    return Request(
        f"request-{number}", "/csi.v1.Controller/DeleteVolume", message, 4e9, "pool-of-n2"
    )


async def asked_in_vain(controller: ControllerSide, node: NodeSide) -> Request:
    """Ask with too little time for an answer, until the node has the request: the store may be busy for longer."""
    arrives = asyncio.ensure_future(anext(node.requests()))
    while not arrives.done():
        with pytest.raises(NodeAbsent):
            await controller.ask("n1", request(), 0.2)
    return await arrives


class StoreContract:
    """The tests."""

    async def test_node_is_known_by_its_last_announcement(self, cluster: Cluster) -> None:
        node, controller = await cluster.node("n1"), await cluster.controller("c")
        await node.announce(announcement("n1"))
        await node.announce(announcement("n1", capacity_bytes=7))
        await eventually(lambda: [a.capacity_bytes for a in controller.nodes().values()] == [7])
        assert controller.nodes() == {"n1": announcement("n1", capacity_bytes=7)}
        assert controller.known_pools() == {"pool-of-n1": "n1"}

    async def test_controller_that_is_ready_knows_the_nodes_at_once(self, cluster: Cluster) -> None:
        node = await cluster.node("n1")
        await node.announce(announcement("n1"))
        controller = await cluster.controller("c")
        await controller.ready(WAIT_S)
        assert controller.known_pools() == {"pool-of-n1": "n1"}

    async def test_node_with_another_pool_keeps_the_first_one_known(self, cluster: Cluster) -> None:
        node, controller = await cluster.node("n1"), await cluster.controller("c")
        await node.announce(announcement("n1", "a"))
        await eventually(lambda: "a" in controller.known_pools())
        await node.announce(announcement("n1", "b"))
        await eventually(lambda: "b" in controller.known_pools())
        assert controller.known_pools() == {"a": "n1", "b": "n1"}

    async def test_request_reaches_its_node_and_the_answer_its_caller(
        self, cluster: Cluster
    ) -> None:
        n1, n2 = await cluster.node("n1"), await cluster.node("n2")
        controller = await cluster.controller("c")
        await n1.announce(announcement("n1"))
        await n2.announce(announcement("n2"))
        async with controller.lead("c"):
            asked = asyncio.create_task(controller.ask("n2", request(), WAIT_S))
            got = await asyncio.wait_for(anext(n2.requests()), WAIT_S)
            assert got == request()
            await n2.answer(got, Answer(5, "no such volume", b"details"))
            assert await asked == Answer(5, "no such volume", b"details")

    async def test_requests_come_in_the_order_in_which_they_were_put(
        self, cluster: Cluster
    ) -> None:
        node, controller = await cluster.node("n1"), await cluster.controller("c")
        await node.announce(announcement("n1"))
        async with controller.lead("c"):
            asks = []
            for number in (3, 1, 2):
                asks.append(asyncio.create_task(controller.ask("n1", request(number), WAIT_S)))
                reader = node.requests()
                for _ in asks:  # a new reader gets all that have no answer
                    last = await asyncio.wait_for(anext(reader), WAIT_S)
                assert last == request(number)
            reader = node.requests()
            order = [await asyncio.wait_for(anext(reader), WAIT_S) for _ in asks]
            assert [each.request_id for each in order] == ["request-3", "request-1", "request-2"]
            for each in order:
                await node.answer(each, Answer(0, "", each.request_id.encode()))
            answers = await asyncio.gather(*asks)
        assert [each.response for each in answers] == [b"request-3", b"request-1", b"request-2"]

    async def test_answered_request_does_not_come_again(self, cluster: Cluster) -> None:
        node, controller = await cluster.node("n1"), await cluster.controller("c")
        await node.announce(announcement("n1"))
        async with controller.lead("c"):
            first = asyncio.create_task(controller.ask("n1", request(1), WAIT_S))
            await node.answer(await anext(node.requests()), Answer(0))
            await first
            second = asyncio.create_task(controller.ask("n1", request(2), WAIT_S))
            got = await anext(node.requests())
            assert got.request_id == "request-2"
            await node.answer(got, Answer(0))
            await second

    async def test_same_request_joins_the_one_under_way(self, cluster: Cluster) -> None:
        node, controller = await cluster.node("n1"), await cluster.controller("c")
        await node.announce(announcement("n1"))
        async with controller.lead("c"):
            asked = await asked_in_vain(controller, node)
            again = asyncio.create_task(controller.ask("n1", request(), WAIT_S))
            await node.answer(asked, Answer(0, "", b"once"))
            assert (await again).response == b"once"

    async def test_answer_given_after_its_caller_left_is_found_by_the_next(
        self, cluster: Cluster
    ) -> None:
        node, controller = await cluster.node("n1"), await cluster.controller("c")
        await node.announce(announcement("n1"))
        async with controller.lead("c"):
            await node.answer(await asked_in_vain(controller, node), Answer(0, "", b"late"))
            assert (await controller.ask("n1", request(), WAIT_S)).response == b"late"

    async def test_answer_to_an_earlier_request_is_not_treated_as_the_later_ones(
        self, cluster: Cluster
    ) -> None:
        node, controller = await cluster.node("n1"), await cluster.controller("c")
        await node.announce(announcement("n1"))
        async with controller.lead("c"):
            first = asyncio.create_task(controller.ask("n1", request(), WAIT_S))
            earlier = await anext(node.requests())
            await node.answer(earlier, Answer(0, "", b"first"))
            assert (await first).response == b"first"
            second = asyncio.create_task(controller.ask("n1", request(), WAIT_S))
            later = await anext(node.requests())
            await node.answer(earlier, Answer(0, "", b"stale"))
            await node.answer(later, Answer(0, "", b"second"))
            assert (await second).response == b"second"

    async def test_answer_to_an_unknown_request_is_dropped(self, cluster: Cluster) -> None:
        node, controller = await cluster.node("n1"), await cluster.controller("c")
        await node.announce(announcement("n1"))
        await node.answer(request(9), Answer(0, "", b"unasked"))
        async with controller.lead("c"):
            asked = asyncio.create_task(controller.ask("n1", request(9), WAIT_S))
            await node.answer(await anext(node.requests()), Answer(0, "", b"asked"))
            assert (await asked).response == b"asked"

    async def test_first_placement_of_a_key_stays(self, cluster: Cluster) -> None:
        controller = await cluster.controller("c")
        async with controller.lead("c"):
            assert await controller.placement("volume-1") == ""
            assert await controller.place("volume-1", "a") == "a"
            assert await controller.place("volume-1", "b") == "a"
            assert await controller.placement("volume-1") == "a"

    async def test_of_concurrent_placements_one_wins(self, cluster: Cluster) -> None:
        controller = await cluster.controller("c")
        async with controller.lead("c"):
            got = await asyncio.gather(
                *(controller.place("volume-1", f"p{number}") for number in range(16))
            )
            assert len(set(got)) == 1
            assert await controller.placement("volume-1") == got[0]

    async def test_unplace_removes_only_what_names_that_pool(self, cluster: Cluster) -> None:
        controller = await cluster.controller("c")
        async with controller.lead("c"):
            await controller.place("volume-1", "a")
            await controller.unplace("volume-1", "b")
            assert await controller.placement("volume-1") == "a"
            await controller.unplace("volume-1", "a")
            await controller.unplace("volume-1", "a")
            assert await controller.placement("volume-1") == ""

    async def test_unplace_all_removes_what_begins_so_and_nothing_else(
        self, cluster: Cluster
    ) -> None:
        controller, other = await cluster.controller("c"), await cluster.controller("other")
        async with controller.lead("c"):
            for key in ("mark-a", "mark-b", "mark", "settled", "volume-mark-a"):
                await controller.place(key, "pool")
            await controller.unplace_all(("mark-", "settled"))
            left = await controller.placements("", 9)
            with pytest.raises(LeadershipLost):
                await other.unplace_all(("mark",))
        assert left == (("mark", "pool"), ("volume-mark-a", "pool"))
        assert await other.placements("", 9) == left

    async def test_placements_are_listed_in_pages_by_key(self, cluster: Cluster) -> None:
        controller = await cluster.controller("c")
        async with controller.lead("c"):
            for key in ("b", "a", "d", "c"):
                await controller.place(key, f"pool-{key}")
            assert await controller.placements("", 2) == (("a", "pool-a"), ("b", "pool-b"))
            assert await controller.placements("b", 9) == (("c", "pool-c"), ("d", "pool-d"))
            assert await controller.placements("d", 9) == ()

    async def test_controller_that_does_not_lead_changes_nothing(self, cluster: Cluster) -> None:
        leader, other = await cluster.controller("c1"), await cluster.controller("c2")
        async with leader.lead("c1"):
            await leader.place("volume-1", "a")
            with pytest.raises(LeadershipLost):
                await other.place("volume-2", "b")
            with pytest.raises(LeadershipLost):
                await other.unplace("volume-1", "a")
            with pytest.raises(LeadershipLost):
                await other.ask("n1", request(), 1)
            assert await other.placement("volume-1") == "a"
            assert await other.placement("volume-2") == ""

    async def test_second_controller_leads_after_the_first_has_left(self, cluster: Cluster) -> None:
        first, second = await cluster.controller("c1"), await cluster.controller("c2")
        entered = asyncio.Event()

        async def follow() -> None:
            async with second.lead("c2") as term:
                assert term.is_held
                entered.set()
                await second.place("volume-2", "b")

        async with first.lead("c1") as term:
            following = asyncio.create_task(follow())
            assert term.is_held
            await first.place("volume-1", "a")
            assert not entered.is_set()
        await asyncio.wait_for(following, WAIT_S)
        with pytest.raises(LeadershipLost):
            await first.place("volume-3", "c")

    async def test_next_leader_finds_the_placements_of_the_one_before(
        self, cluster: Cluster
    ) -> None:
        first, second = await cluster.controller("c1"), await cluster.controller("c2")
        async with first.lead("c1"):
            await first.place("volume-1", "a")
        async with second.lead("c2"):
            assert await second.place("volume-1", "b") == "a"

    async def test_pool_of_an_unknown_node_is_retired_by_its_id(self, cluster: Cluster) -> None:
        controller = await cluster.controller("c")
        operator = await cluster.controller("operator")
        await operator.retire_pool("a")
        await eventually(lambda: controller.retired_pools() == {"a"})

    async def test_all_of_many_pools_of_a_node_are_retired(self, cluster: Cluster) -> None:
        node, operator = await cluster.node("n1"), await cluster.controller("operator")
        pools = {f"pool-{number}" for number in range(120)}
        for pool in pools:
            await node.announce(announcement("n1", pool))
        await cluster.leave("n1")
        assert set(await operator.retire("n1")) == pools
        await eventually(lambda: operator.retired_pools() == pools)

    async def test_retired_node_is_forgotten_and_its_pools_stay_retired(
        self, cluster: Cluster
    ) -> None:
        node, controller = await cluster.node("n1"), await cluster.controller("c")
        operator = await cluster.controller("operator")
        await node.announce(announcement("n1", "a"))
        await eventually(lambda: "a" in controller.known_pools())
        await cluster.leave("n1")
        assert await operator.retire("n1") == ("a",)
        await eventually(lambda: controller.retired_pools() == {"a"})
        assert controller.known_pools() == {}
        node = await cluster.node("n1")
        with contextlib.suppress(StoreUnavailable):  # a store may refuse it at once
            await node.announce(announcement("n1", "a", capacity_bytes=5))
        assert "a" not in controller.known_pools()
        assert controller.retired_pools() == {"a"}

    async def test_retiring_again_is_a_success_and_of_an_unknown_node_none(
        self, cluster: Cluster
    ) -> None:
        node, operator = await cluster.node("n1"), await cluster.controller("operator")
        await node.announce(announcement("n1", "a"))
        await cluster.leave("n1")
        with pytest.raises(retirement.NoSuchClusterNode):
            await operator.retire("n2")
        assert await operator.retire("n1") == ("a",)
        assert await operator.retire("n1") == ("a",)
        await operator.retire_pool("a")
        await eventually(lambda: operator.retired_pools() == {"a"})

    async def test_connected_node_is_not_retired(self, cluster: Cluster) -> None:
        node, operator = await cluster.node("n1"), await cluster.controller("operator")
        await node.announce(announcement("n1", "a"))
        with pytest.raises(retirement.NodeStillConnected):
            await operator.retire("n1")
        with pytest.raises(retirement.PoolStillAnnounced):
            await operator.retire_pool("a")
        assert operator.retired_pools() == frozenset()

    async def test_pool_that_moved_is_not_retired_with_the_node_that_had_it(
        self, cluster: Cluster
    ) -> None:
        """The node that has the disk now announces it; known as the other one's it is if that one announced last."""
        operator = await cluster.controller("operator")
        second, first = await cluster.node("n2"), await cluster.node("n1")
        await second.announce(announcement("n2", "a"))
        await first.announce(announcement("n1", "a"))
        await cluster.leave("n1")
        with pytest.raises(retirement.PoolStillAnnounced):
            await operator.retire("n1")
        await cluster.leave("n2")
        with pytest.raises(retirement.PoolOfKnownNode):
            await operator.retire_pool("a")
        assert await operator.retire("n1") == ("a",)
