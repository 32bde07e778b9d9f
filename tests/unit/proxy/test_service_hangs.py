"""Calls for targets that hang: a thread each, an answer in time, nobody else harmed."""

import asyncio
import os
from functools import partial

import grpc
import pytest

from crust.proxy import service as csi_service
from tests.support.faults.refusals import refused, repeated
from tests.support.nodes.hanging_targets import THREADS, HangingTargets, running
from tests.support.nodes.places import Places
from tests.unit.proxy.conftest import lose_a_guard

Code = grpc.StatusCode


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
            for _ in range(2 * THREADS):
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
        for _ in range(2 * THREADS):
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
