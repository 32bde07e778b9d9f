"""Proxy and shim are taken over while a CO publishes, asks and unpublishes without a pause."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from crust.proxy import app
from crust.rpc import channel
from tests.support.nodes import node as nodes
from tests.support.nodes.node import NAMED, Co, Places


class Cos:
    """Two COs: a kubelet, which connects for each call, and one that keeps its connection."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.cycles = 0
        self._more = asyncio.Condition()

    async def cycles_more(self, count: int) -> None:
        """Wait until so many volumes were published and unpublished from now on."""
        wanted = self.cycles + count
        async with asyncio.timeout(60), self._more:
            await self._more.wait_for(lambda: self.cycles >= wanted)

    async def kubelet(self) -> None:
        """A new connection for each call."""
        target = self.places.target("kubelet")
        while True:
            async with channel.connect(self.places.csi) as connected:
                await Co(connected).publish("vol-1", target, timeout_s=30, volume_context=NAMED)
            async with channel.connect(self.places.csi) as connected:
                await Co(connected).unpublish("vol-1", target, timeout_s=30)
            await self._count()

    async def sidecar(self) -> None:
        """One connection for all."""
        target = self.places.target("sidecar")
        async with channel.connect(self.places.csi) as connected:
            while True:
                await Co(connected).publish("vol-2", target, timeout_s=30, volume_context=NAMED)
                await Co(connected).unpublish("vol-2", target, timeout_s=30)
                await self._count()

    async def _count(self) -> None:
        async with self._more:
            self.cycles += 1
            self._more.notify_all()

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        """Call while the block runs; an error ends it."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.kubelet()), group.create_task(self.sidecar())]
            yield
            for task in tasks:
                task.cancel()


async def test_volumes_are_published_without_an_error_across_takeovers_of_proxy_and_shim(
    places: Places,
) -> None:
    cos = Cos(places)
    settings = places.settings(grace_s=20).model_copy(update={"take_over": True})
    async with (
        nodes.running(places, grace_s=20) as node,
        node.handler(),
        AsyncExitStack() as successors,
    ):
        async with cos.calling():
            await cos.cycles_more(3)
            second = app.running(settings, targets=node.targets, devices=node.devices)
            await successors.enter_async_context(second)
            await cos.cycles_more(10)
            await successors.enter_async_context(nodes.shim(places, take_over=True))
            await cos.cycles_more(10)
        # the predecessor's connections lead to the successor, which has the volume
        target = places.target("after")
        async with channel.connect(places.csi) as connected:
            await Co(connected).publish("vol-3", target, volume_context=NAMED)
        with node.sandbox(target):
            assert (await node.co.stats("vol-3", target)).usage
