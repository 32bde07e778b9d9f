"""What `make docs-pictures` shows: a `crust node` with volumes, sandboxes and troubles, scraped by a real Prometheus.

A minute and a half: volumes come and go, some calls are refused, the pool fills up, and at last the runtime ends. The
guests are not booted: the sandboxes claim by the SDK, as a runtime does. The alert rules are those of deploy/ with a
`for` of FOR, because nobody waits 15 minutes for a picture.
"""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from crust.core import volumes
from crust.runtime_handler import claim_volume
from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.kubelet import Kubelet
from tests.support.drivers import own_driver
from tests.support.pages import prometheus
from tests.support.runtimes.fake_handler import FakeHandler, running

RULES = Path(__file__).parents[3] / "deploy" / "prometheus" / "crust-rules.yaml"
FOR = "5s"
MIB, GIB = 1 << 20, 1 << 30
LIFE_S, ALONE_S = 60.0, 20.0
"""How long volumes come and go, and how long the node is without a runtime after that."""


@dataclass(frozen=True, slots=True)
class Monitored:
    """A Prometheus that has seen the whole story."""

    address: str
    began_s: float
    ended_s: float


@asynccontextmanager
async def seen(base: Path) -> AsyncIterator[Monitored]:
    """The Prometheus, after the story, while the block runs. Everything lies below `base`."""
    rules = base / "rules.yaml"
    rules.write_text(re.sub(r"for: \w+", f"for: {FOR}", RULES.read_text()))
    scraped = f"127.0.0.1:{prometheus.free_port()}"
    os.environ["CRUST_METRICS_ADDRESS"] = scraped
    with own_driver.serving(base, "1.12", "node") as driver:
        async with prometheus.scraping(base, scraped, rules) as address:
            run = base / "run"
            kubelet = Kubelet(driver.target_root, str(driver.socket), f"{run}/inspect.sock")
            await prometheus.scraped_often(address)
            began_s = time.time()
            await _Story(kubelet, run).tell()
            yield Monitored(address, began_s, time.time())
            await kubelet.close()


class _Story:
    def __init__(self, kubelet: Kubelet, run: Path) -> None:
        self._kubelet = kubelet
        self._run = run

    async def tell(self) -> None:
        proxy, own = f"{self._run}/handlers.sock", f"{self._run}/handler.sock"
        async with AsyncExitStack() as stack:
            async with running(FakeHandler(), proxy_socket=proxy, endpoint=own):
                ends_s = time.monotonic() + LIFE_S
                kept = await self._pod("kept", stack)
                number = 0
                while time.monotonic() < ends_s:
                    number += 1
                    await self._come_and_go(f"pod-{number}")
                    if number == 3:
                        await self._kubelet.create("large", 58 * GIB)
            await asyncio.sleep(ALONE_S)  # alerts take time, and nothing else happens
        await self._gone(kept, "kept")

    async def _pod(self, name: str, stack: AsyncExitStack) -> csi_pb2.Volume:
        volume = await self._kubelet.create(name, 64 * MIB)
        target = self._kubelet.target(name)
        await self._kubelet.stage(volume)
        await self._kubelet.publish(volume, target, defer=True)
        claim = await asyncio.to_thread(
            claim_volume,
            f"{self._run}/volumes",
            volumes.TargetPath.parse(str(target)),
            volumes.SandboxId(name),
            volumes.HandlerName("kata"),
            features=frozenset(volumes.HandlerFeature),
        )
        stack.callback(claim.release)
        await claim.mounted(_nothing)
        return volume

    async def _come_and_go(self, name: str) -> None:
        async with AsyncExitStack() as stack:
            volume = await self._pod(name, stack)
            await self._kubelet.stats(volume, self._kubelet.target(name))
            # refused: a sandbox has the volume
            await self._kubelet.refusal_of_unpublish(volume, self._kubelet.target(name))
        await self._gone(volume, name)
        with suppress(grpc.aio.AioRpcError):  # refused: there is no such volume any more
            await self._kubelet.publish(volume, self._kubelet.target(name), defer=True)

    async def _gone(self, volume: csi_pb2.Volume, name: str) -> None:
        await self._kubelet.unpublish(volume, self._kubelet.target(name))
        await self._kubelet.unstage(volume)
        await self._kubelet.delete(volume)


async def _nothing() -> None:
    """The filesystem fills its device."""
