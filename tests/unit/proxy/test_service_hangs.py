"""Targets that hang: a thread each, an answer in time, nobody else harmed; and health that needs a thread."""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc
import pytest

from crust.core import volumes
from crust.handoff import watch
from crust.host.process import systemd, workers
from crust.host.process.workers import Workers
from crust.proxy import look as proxy_look
from crust.proxy import service as csi_service
from crust.proxy.target import Seen
from tests.support.faults.refusals import refused, repeated, until_probe
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.fake_targets import FakeTargets
from tests.support.nodes.places import Places
from tests.unit.proxy.conftest import lose_a_guard

Code = grpc.StatusCode
_THREADS = 3


class HangingTargets(FakeTargets):
    """The guards of targets in `hung`, and looks at the target `unseen`, do not answer until `released`."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.hung: set[str] = set()
        self.unseen = ""
        self.calls: Counter[str] = Counter()
        self.released = threading.Event()
        self._more = threading.Condition()

    def look(self, target: volumes.TargetPath) -> Seen:
        self._hang(target, {self.unseen})
        return super().look(target)

    def mount_guard(self, target: volumes.TargetPath, *, names: bool) -> None:
        self._hang(target, self.hung)
        with self._more:
            super().mount_guard(target, names=names)
            self._more.notify_all()

    def unmount_guard(self, target: volumes.TargetPath) -> None:
        self._hang(target, self.hung)
        super().unmount_guard(target)

    def wait_for(self, target: str) -> None:
        """Until a call hangs there. Blocks."""
        with self._more:
            self._more.wait_for(lambda: self.calls[target])

    def wait_for_guard(self, target: str) -> None:
        """Until the guard is mounted there. Blocks."""
        with self._more:
            self._more.wait_for(lambda: self.has_guard(volumes.TargetPath(target)), timeout=50)

    def _hang(self, target: volumes.TargetPath, hung: set[str]) -> None:
        if target.text not in hung:
            return
        with self._more:
            self.calls[target.text] += 1
            self._more.notify_all()
        self.released.wait()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy is no proxy that hangs."""
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)


@pytest.fixture
def targets(places: Places) -> HangingTargets:
    """Targets of which none hangs yet."""
    return HangingTargets(places.kubelet)


@asynccontextmanager
async def running(places: Places, targets: HangingTargets) -> AsyncIterator[FakeNode]:
    """A node with few threads, and a handler. A stop waits for what hangs, so that is released first."""
    threads = Workers("the proxy", limit=_THREADS)
    async with FakeNode(places, targets=targets, threads=threads) as node, node.handler():
        try:
            yield node
        finally:
            targets.released.set()


@pytest.mark.parametrize("call", ["publish", "unpublish"])
async def test_hanging_call_is_aborted_and_retries_take_no_thread(
    places: Places, targets: HangingTargets, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    target = places.target("one")
    async with running(places, targets) as node:
        if call == "unpublish":
            await node.co.publish("vol-1", target)
        ask = partial(getattr(node.co, call), "vol-1", target, timeout_s=60)
        targets.hung.add(target)
        with monkeypatch.context() as patched:
            patched.setattr(csi_service, "_LIMIT_S", 0.01)
            for _ in range(2 * _THREADS):
                await refused(ask(), Code.ABORTED, f"Node{call.title()}Volume", "has not ended")
        await asyncio.to_thread(targets.wait_for, target)
        assert targets.calls == {target: 1}
        await node.co.publish("vol-2", places.target("two"), timeout_s=60)
        targets.released.set()
        await repeated(ask, Code.ABORTED)
        assert (node.entry(target) is not None) is (call == "publish")


async def test_retries_of_an_unpublish_whose_look_hangs_take_one_thread(
    places: Places, targets: HangingTargets
) -> None:
    lose_a_guard(places)
    targets.unseen = places.target("hung")
    async with running(places, targets) as node:
        for _ in range(2 * _THREADS):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await node.co.unpublish("vol-hung", targets.unseen, timeout_s=0.5)
            assert caught.value.code() in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
        await node.co.publish("vol-2", places.target("two"), timeout_s=60)
        assert targets.calls == {targets.unseen: 1}


async def test_unpublish_of_a_host_mount_uses_no_thread(
    places: Places, targets: HangingTargets, target: str
) -> None:
    raw = "plugins/kubernetes.io/csi/volumeDevices/publish/pvc-1/uid-1"
    os.makedirs(f"{places.kubelet}/{raw}")  # of an unknown volume
    async with running(places, targets) as node:
        await node.co.publish("vol-1", target, defer=False)
        targets.unseen = target
        await node.co.unpublish("vol-1", target)
        assert not targets.calls
        assert len(node.driver.called("NodeUnpublishVolume")) == 1


async def test_proxy_tells_the_watchdog_of_its_process(
    places: Places, targets: HangingTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.setattr(systemd, "_send", lambda message, _: sent.append(message))
    async with running(places, targets) as node:
        await until_probe(node.co.channel, Code.OK)
    assert b"WATCHDOG=1" in sent


async def test_guard_mount_that_hangs_does_not_stop_the_looks(
    places: Places, targets: HangingTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_look, "_HANG_S", 0.01)
    monkeypatch.setattr(watch, "RESCAN_S", 0.05)
    async with running(places, targets) as node:
        target, other = places.target("one"), places.target("two")
        await node.co.publish("vol-1", target)
        await node.co.publish("vol-2", other)
        targets.hung.add(target)
        for path in (target, other):
            FakeTargets.unmount_guard(targets, volumes.TargetPath(path))
        await asyncio.to_thread(targets.wait_for, target)
        await until_guarded(targets, other)
        assert targets.calls == {target: 1}
        targets.released.set()
        await until_guarded(targets, target)


async def until_guarded(targets: HangingTargets, target: str) -> None:
    await asyncio.to_thread(targets.wait_for_guard, target)
    assert targets.has_guard(volumes.TargetPath(target))
