"""What the suite knows of a driver before its first case."""

import asyncio
from pathlib import Path

import pytest

from crust_conformance.options import Options
from crust_conformance.orchestrator import capabilities
from crust_conformance.orchestrator.calls import connected
from tests.support.drivers.fake_driver import FakeDriver
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places


@pytest.mark.parametrize("at", ["csi", "shim", "driver"])
async def test_proxy_in_front_of_the_driver_is_seen(places: Places, at: str) -> None:
    def ask(socket: str) -> frozenset[str]:
        with connected(socket) as channels:
            return capabilities.of_driver(channels, Options(socket=socket, target_root=Path("/")))

    async with FakeNode(places, driver=FakeDriver()):
        has = await asyncio.to_thread(ask, getattr(places, at))
    assert (capabilities.UNPROXIED in has) is (at != "csi")
