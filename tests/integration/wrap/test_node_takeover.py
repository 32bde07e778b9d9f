"""A takeover of `crust node` around a wrapped driver: what the shim does is handed over with what the proxy does."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from crust.node import process
from tests.integration.wrap.conftest import node_with

pytestmark = pytest.mark.root


async def test_no_call_about_a_wrapped_volume_fails_while_a_node_takes_over() -> None:
    async with node_with("cloud", is_one_process=True) as node, AsyncExitStack() as successors:
        volume, target = await node.volume(), node.target("one")
        cycles = asyncio.Semaphore(0)
        is_ending = False

        async def kubelet() -> None:
            while not is_ending:
                await node.stage(volume)
                await node.publish(volume, target)
                await node.unpublish(volume, target)
                await node.unstage(volume)
                cycles.release()

        async def more(count: int) -> None:
            async with asyncio.timeout(60):
                for _ in range(count):
                    await cycles.acquire()

        async with asyncio.TaskGroup() as group:
            group.create_task(kubelet())
            await more(2)
            second = process.running(node.node_settings(take_over=True))
            await successors.enter_async_context(second)
            while not cycles.locked():
                await cycles.acquire()
            await more(3)
            is_ending = True
        await node.check_gone(volume, target)
