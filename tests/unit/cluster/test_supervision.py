"""What runs in the background of a cluster begins again, or ends its process: it never ends in silence."""

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crust import pool_ids
from crust.blockdriver import cluster_controller, cluster_node
from crust.cluster import forever
from crust.cluster.central.survey import Survey
from crust.cluster.protocol import Announcement
from crust.rpc.serving.health import Health
from tests.support.cluster.central_cluster import DESCRIBED, simulated
from tests.support.cluster.cluster_contract import eventually
from tests.support.cluster.memory_cluster import MemoryController, MemoryNode, Store, Term
from tests.support.cluster.simulated_pools import SimulatedPool


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forever, "_PAUSE_S", 0)


async def test_surveys_go_on_after_an_unexpected_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    survey, failures = Survey._survey, [ValueError("unexpected")]

    async def failing_once(self: Survey, pool_id: str) -> None:
        if failures:
            raise failures.pop()
        await survey(self, pool_id)

    monkeypatch.setattr(Survey, "_survey", failing_once)
    async with simulated("n1") as cluster:
        await cluster.controller()
        await cluster.surveyed()
    assert not failures


class FailingNode(MemoryNode):
    """A store whose client has a fault, once."""

    failures = 1

    async def announce(self, announcement: Announcement) -> None:
        if self.failures:
            self.failures -= 1
            raise ValueError("unexpected")
        await super().announce(announcement)


async def test_agent_announces_its_pool_after_an_unexpected_exception() -> None:
    store = Store()
    pool = SimpleNamespace(ids=pool_ids.PoolIds(f"{1:016x}"), is_served=False, times_served=1)
    services = SimulatedPool("n1", 1)
    driver: Any = SimpleNamespace(
        name="driver",
        stores=SimpleNamespace(pool=pool),
        controller=services,
        group_controller=services,
        snapshot_metadata=services,
        workers=SimpleNamespace(used=contextlib.nullcontext),
    )
    async with cluster_node.joined(driver, FailingNode(store, "n1"), "n1", Health()):
        await eventually(lambda: "n1" in store.kept.announcements)


class FailingController(MemoryController):
    """A store whose client has a fault on the way to lead."""

    @contextlib.asynccontextmanager
    async def lead(self, name: str) -> AsyncIterator[Term]:
        raise ValueError("unexpected")
        yield


async def test_controller_whose_leadership_fails_ends_its_process(tmp_path: Path) -> None:
    serving = cluster_controller.serving(
        FailingController(Store(), "c"),
        DESCRIBED,
        name="driver",
        socket=os.path.join(tmp_path, "csi.sock"),
        run_dir=os.path.join(tmp_path, "run"),
        settle_s=0,
    )
    async with serving as daemon:
        with pytest.raises(cluster_controller.LeadershipFailed):
            await daemon.forever()
