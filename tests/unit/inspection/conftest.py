"""A node that is shown."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.drivers import fake_driver
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places


@pytest_asyncio.fixture
async def node(places: Places) -> AsyncIterator[FakeNode]:
    async with FakeNode(places, driver=fake_driver.FakeDriver()) as running, running.handler():
        yield running
