"""The shim beside a controller."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.drivers.vendor_controller import Served, serve


@pytest_asyncio.fixture
async def shim() -> AsyncIterator[Served]:
    async for served in serve():
        yield served
