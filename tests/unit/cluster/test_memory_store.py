"""The store in memory keeps to the contract of stores, and its faults do what they say."""

import asyncio

import pytest

from crust.cluster.protocol import Answer, ControllerSide, NodeSide, StoreUnavailable
from tests.support.cluster.cluster_contract import StoreContract, announcement, request
from tests.support.cluster.memory_cluster import Store


class MemoryCluster:
    """`Cluster`."""

    def __init__(self) -> None:
        self.store = Store()

    async def node(self, node_id: str) -> NodeSide:
        self.store.heal(node_id)
        return self.store.node(node_id)

    async def leave(self, node_id: str) -> None:
        self.store.cut(node_id)

    async def controller(self, name: str) -> ControllerSide:
        return self.store.controller(name)


@pytest.fixture
async def cluster() -> MemoryCluster:
    return MemoryCluster()


class TestMemoryStore(StoreContract):
    """The contract."""


async def test_cut_node_is_absent_and_cannot_announce() -> None:
    store = Store()
    node = store.node("n1")
    await node.announce(announcement("n1"))
    store.cut("n1")
    assert store.controller().nodes() == {}
    with pytest.raises(StoreUnavailable):
        await node.announce(announcement("n1"))


async def test_unanswered_request_comes_again_after_a_reconnect() -> None:
    store = Store()
    node, controller = store.node("n1"), store.controller()
    async with controller.lead("c"):
        asked = asyncio.create_task(controller.ask("n1", request(), 20))
        reader = node.requests()
        first = await anext(reader)
        store.redeliver("n1")
        assert await anext(reader) == first
        await node.answer(first, Answer(0))
        await asked


async def test_lost_answer_leaves_its_caller_without_one() -> None:
    store = Store()
    node, controller = store.node("n1"), store.controller()
    async with controller.lead("c"):
        asked = asyncio.create_task(controller.ask("n1", request(), 20))
        got = await anext(node.requests())
        store.lose_next_answer()
        await node.answer(got, Answer(0))
        assert not asked.done()
        asked.cancel()
