"""Proxy, shim and block driver on the real kernel, and a sandbox without a virtual machine."""

from collections.abc import AsyncIterator

import pytest

from tests.support.nodes.node import PARTS
from tests.support.nodes.places import Places
from tests.support.nodes.served_node import ONE_PROCESS, BlockNode, started


@pytest.fixture(params=["processes", "node"])
async def chain(request: pytest.FixtureRequest, places: Places) -> AsyncIterator[BlockNode]:
    """A node that serves, its parts in processes of their own or in one."""
    parts = ONE_PROCESS if request.param == "node" else PARTS
    async with started(BlockNode(places, parts=parts)) as running_chain:
        yield running_chain
