"""Pods come and go at random while driver and shim die, restart, and answer errors before and after their work.

The CO does as a kubelet: a final status means to it that nothing exists, and it never unpublishes or unstages what it
treats as that. So whenever a status is final, nothing may be there. SEEDS in the environment is how often each runs.
"""

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import grpc
import grpc.aio
import pytest

from crust.rpc import status
from crust.rpc.status import PeerStatus
from tests.integration.wrap.conftest import DEFERRED, Volume, Wrapped, node_with
from tests.support.co import NAMED
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.root
SEEDS = pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", "1"))))
ROUNDS = 6
Code = grpc.StatusCode
_log = logging.getLogger(__name__)
FAULTS = (
    *("die before", "die after"),
    *("fail INTERNAL no", "fail-after INTERNAL late", "fail PERMISSION_DENIED no"),
    *("fail ABORTED busy", "fail-after UNAVAILABLE late", "fail-after DEADLINE_EXCEEDED late"),
)


@dataclass
class Kubelet:
    """Calls in a kubelet's order, with a random fault in each."""

    node: Wrapped
    random_faults: random.Random

    async def call(self, method: str, step: Callable[[], Awaitable[None]]) -> str:
        """One attempt: "ok", "final" or "uncertain"."""
        fault = self.random_faults.choice(FAULTS) if self.random_faults.random() < 0.5 else ""
        self.node.driver.misbehave(**({method: fault} if fault else {}))
        _log.info("%s, %s", method, fault or "no fault")
        try:
            await step()
        except grpc.aio.AioRpcError as error:
            _log.info("%s: %s", error.code(), error.details())
            return "final" if status.is_final(PeerStatus(error.code(), "")) else "uncertain"
        else:
            return "ok"
        finally:
            await self._heal()

    async def _heal(self) -> None:
        driver = self.node.driver
        driver.misbehave()
        if driver.process is not None and driver.process.poll() is not None:
            await asyncio.to_thread(driver.wait)
            await asyncio.to_thread(driver.start)
        if self.random_faults.random() < 0.15:
            await self.node.restart("shim")

    async def until_ok(self, method: str, step: Callable[[], Awaitable[None]]) -> None:
        """A kubelet retries the end of a volume for ever, whatever the status."""
        while await self.call(method, step) != "ok":
            pass

    async def stages(self, volume: Volume) -> str:
        """Until it is staged, the kubelet treats it as not staged, or the pod is deleted."""
        while True:
            outcome = await self.call("NodeStageVolume", lambda: self.node.stage(volume))
            if outcome == "final":
                assert not os.path.lexists(self.node.paths(volume).staging)
            if outcome != "uncertain" or self.random_faults.random() < 0.2:
                return outcome

    async def publishes(self, volume: Volume, target: str, *, flag: bool) -> str:
        """The same of the publish, for a guest or for the host."""
        while True:
            publish = partial(self.node.publish, volume, target, flag=flag)
            outcome = await self.call("NodePublishVolume", publish)
            if outcome == "final":
                assert self.node.entry(target) is None
                assert not os.path.lexists(self.node.paths(volume).leaf(target))
            if outcome != "uncertain" or self.random_faults.random() < 0.2:
                return outcome

    async def runs(self, volume: Volume, target: str, *, flag: bool) -> None:
        """A guest has it, and the kubelet is restarted: it stages and publishes again, or deletes the pod."""
        node = self.node
        with node.sandbox(target) as device:
            ends = len(node.driver.calls("NodeUnpublishVolume", "NodeUnstageVolume"))
            for _ in range(2):
                if node.stages:
                    await self.call("NodeStageVolume", lambda: node.stage(volume))
                publish = partial(node.publish, volume, target, flag=flag)
                assert await self.call("NodePublishVolume", publish) != "final"
                await refused(node.unpublish(volume, target), Code.FAILED_PRECONDITION, "box-1")
                if node.stages:
                    await refused(node.unstage(volume), Code.FAILED_PRECONDITION, target)
            assert len(node.driver.calls("NodeUnpublishVolume", "NodeUnstageVolume")) == ends
            assert node.record(target).device == device
            assert node.driver.attached() == [device]

    async def pod(self, volume: Volume, name: str, *, flag: bool, deferred: bool) -> Volume:
        """One pod, from its stage to the end of everything; the volume may have to be attached again meanwhile."""
        node, target = self.node, self.node.target(name)
        staged = await self.stages(volume) if node.stages else "ok"
        published = "final"
        if staged == "ok":
            published = await self.publishes(volume, target, flag=flag)
            if published == "ok" and deferred:
                await self.runs(volume, target, flag=flag)
        if self.random_faults.random() < 0.2:
            volume = await self.reboot(volume, target)
        # what a driver says of a publish on the host passes unchanged, also if it is not true
        elif published != "final" or not deferred:
            await self.until_ok("NodeUnpublishVolume", lambda: node.unpublish(volume, target))
        if staged != "final" and node.stages:
            await self.until_ok("NodeUnstageVolume", lambda: node.unstage(volume))
        node.check_unpublished(volume, target)
        assert not os.path.lexists(node.paths(volume).staging)
        return volume

    async def reboot(self, volume: Volume, target: str) -> Volume:
        """The pod was deleted meanwhile: the kubelet unpublishes what it finds, and removes its directory."""
        await self.node.reboot()
        volume = await self.node.attach(volume)
        await self.until_ok("NodeUnpublishVolume", lambda: self.node.unpublish(volume, target))
        if os.path.isdir(target):
            os.rmdir(target)
        return volume


@SEEDS
@pytest.mark.parametrize("kind", ["cloud", "minimal", "stateful"])
async def test_pods_under_random_driver_faults_leave_no_mounts(kind: str, seed: int) -> None:
    async with node_with(kind) as node:
        kubelet = Kubelet(node, random.Random(seed))
        volume = await node.volume(context=DEFERRED)
        for number in range(ROUNDS):
            volume = await kubelet.pod(volume, f"pod-{number}", flag=False, deferred=True)
        await node.delete_volume(volume.volume_id)
        assert node.driver.attached() == []


@SEEDS
async def test_pods_decided_one_by_one_leave_nothing(seed: int) -> None:
    async with node_with("cloud", is_decided=False) as node:
        kubelet = Kubelet(node, random.Random(seed))
        volume = await node.volume(context=NAMED)
        for number in range(ROUNDS):
            in_guest = kubelet.random_faults.random() < 0.5
            name = f"pod-{number}"
            volume = await kubelet.pod(volume, name, flag=in_guest, deferred=in_guest)
        await node.delete_volume(volume.volume_id)
        assert node.driver.attached() == []
