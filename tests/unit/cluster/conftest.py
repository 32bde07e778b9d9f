"""Three simulated nodes with a store in memory."""

from collections.abc import AsyncIterator

import pytest

from tests.support.cluster.central_cluster import NODES, SimulatedCluster, simulated


@pytest.fixture
async def cluster() -> AsyncIterator[SimulatedCluster]:
    async with simulated(*NODES) as cluster:
        yield cluster
