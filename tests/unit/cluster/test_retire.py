"""`crust cluster retire`: what is refused, because a volume may be in use, and a pool whose node nobody knows."""

import dataclasses

import pytest

from crust.cli import cluster as cli
from tests.support.cluster_contract import announcement
from tests.support.memory_cluster import Store

POOL = f"{1:016x}"


async def test_node_whose_pool_another_connected_node_announces_is_not_retired() -> None:
    store = Store()
    await store.node("n1").announce(announcement("n1", POOL))
    said = store.kept.announcements.pop("n1")
    store.kept.announcements["n2"] = dataclasses.replace(said, node_id="n2")
    with pytest.raises(cli.PoolStillAnnounced):
        await cli._retire_named(store.controller(), "n1", None)
    assert not store.kept.retired


async def test_pool_of_a_node_that_nobody_knows_is_retired_by_its_id() -> None:
    store = Store()
    await cli._retire_named(store.controller(), None, POOL)
    assert store.kept.retired == {POOL}


async def test_pool_that_is_announced_or_of_a_known_node_is_not_retired_by_its_id() -> None:
    store = Store()
    await store.node("n1").announce(announcement("n1", POOL))
    with pytest.raises(cli.PoolStillAnnounced):
        await cli._retire_named(store.controller(), None, POOL)
    store.cut("n1")
    with pytest.raises(cli.PoolOfKnownNode):
        await cli._retire_named(store.controller(), None, POOL)
    assert not store.kept.retired
