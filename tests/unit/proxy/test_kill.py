"""kill -9 of the proxy before each change that it makes: a restart and the CO's retry reach the same result."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from crust import volumes
from crust.handoff import store
from crust.rpc import channel
from crust.runtime_handler import registration, service
from tests.support import fake_driver, fake_handler, proxy_process
from tests.support import node as nodes
from tests.support.fake_targets import FakeTargets
from tests.support.node import Co, Places

POINTS_AT_MOST = 60


@dataclass
class Around:
    """The processes that survive the proxy: driver, shim, handler, and the CO that retries."""

    places: Places
    driver: fake_driver.FakeDriver
    co: Co

    def check_published(self, target: str) -> None:
        entry = store.Store(self.places.volumes).read(volumes.TargetPath(target))
        assert entry is not None
        assert entry.require().key.volume_id == "vol-1"
        assert FakeTargets(self.places.kubelet).has_guard(volumes.TargetPath(target))
        assert self.driver.published[target].deferred

    def check_untouched(self, target: str) -> None:
        assert self.places.entries() == []
        assert not os.path.lexists(target)
        assert self.driver.published == {}


@pytest.fixture
async def around(places: Places) -> AsyncIterator[Around]:
    driver = fake_driver.FakeDriver()
    handler = fake_handler.FakeHandler()
    os.mkdir(places.run, 0o700)
    async with (
        fake_driver.serving(driver, places.driver),
        nodes.shim(places),
        _registering(places, handler),
        channel.connect(places.csi) as connected,
    ):
        yield Around(places, driver, Co(connected))


@asynccontextmanager
async def _registering(places: Places, handler: fake_handler.FakeHandler) -> AsyncIterator[None]:
    """Registered whenever there is a proxy."""
    request = registration.RegisterRequest(
        volumes.HandlerName("kata"),
        "1",
        places.handler,
        fake_handler.FILESYSTEMS,
        fake_handler.ALL_FEATURES,
    )
    async with (
        service.serving(places.handler, handler),
        registration.registered(places.sockets.handlers, request),
    ):
        yield


async def _answered(around: Around, call: str, target: str) -> bool:
    """Make a call; False if the proxy was not there, or not any more. What it refuses is raised.

    ABORTED is repeated, as a CO does: after a start the proxy may be restoring the guard mount at the target.
    """
    while True:
        try:
            await _request(around, call, target)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            if error.code() is not grpc.StatusCode.ABORTED:
                raise
        else:
            return True


async def _request(around: Around, call: str, target: str) -> object:
    if call == "publish":
        return await around.co.publish("vol-1", target, timeout_s=20, volume_context=nodes.NAMED)
    return await around.co.unpublish("vol-1", target, timeout_s=20)


async def _again(around: Around, call: str, target: str) -> None:
    """Repeat a call until it is answered, as a CO does."""
    async with asyncio.timeout(60):
        while not await _answered(around, call, target):
            pass


async def _survives(around: Around, call: str, target: str, number: int) -> bool:
    """Whether a proxy that dies at change `number` answered the call."""
    async with proxy_process.running(around.places, die_at=number) as proxy:
        if await _answered(around, call, target):
            return True
        assert await proxy.ended() == -signal.SIGKILL
        return False


@pytest.mark.parametrize("then", ["publish", "unpublish"])
@pytest.mark.spec("D-23")
async def test_publish_killed_at_any_call_is_finished_or_undone_by_the_next_call(
    around: Around, then: str
) -> None:
    target = around.places.target("one")
    for number in range(POINTS_AT_MOST):
        if await _survives(around, "publish", target, number):
            break
        async with proxy_process.running(around.places):
            if then == "publish":
                await _again(around, "publish", target)
                around.check_published(target)
            await _again(around, "unpublish", target)
            around.check_untouched(target)
    else:
        raise AssertionError("the publish has no end")
    assert number >= 6, "the seam saw too few changes to prove anything"


@pytest.mark.spec("D-23")
async def test_unpublish_killed_at_any_call_is_finished_by_the_retry(around: Around) -> None:
    target = around.places.target("one")
    for number in range(POINTS_AT_MOST):
        async with proxy_process.running(around.places):
            await _again(around, "publish", target)
            around.check_published(target)
        if await _survives(around, "unpublish", target, number):
            break
        async with proxy_process.running(around.places):
            await _again(around, "unpublish", target)
            around.check_untouched(target)
    else:
        raise AssertionError("the unpublish has no end")
    assert number >= 5, "the seam saw too few changes to prove anything"


@pytest.mark.spec("D-23")
async def test_unpublish_killed_at_any_call_leaves_nothing_that_a_restarted_kubelet_does_not_find(
    around: Around,
) -> None:
    target = around.places.target("one")
    targets = FakeTargets(around.places.kubelet)
    forgotten = 0
    for number in range(POINTS_AT_MOST):
        async with proxy_process.running(around.places):
            await _again(around, "publish", target)
        if await _survives(around, "unpublish", target, number):
            break
        # the kubelet restarts before the proxy does: only a mount point is a volume to it
        is_found = targets.has_guard(volumes.TargetPath(target))
        async with proxy_process.running(around.places):
            if is_found:
                await _again(around, "unpublish", target)
            around.check_untouched(target)
        forgotten += not is_found
    assert forgotten >= 3, "no kill came after the guard was unmounted"


@pytest.mark.parametrize("call", ["publish", "unpublish"])
async def test_a_proxy_killed_while_the_driver_works(around: Around, call: str) -> None:
    target = around.places.target("one")
    method = "NodePublishVolume" if call == "publish" else "NodeUnpublishVolume"
    async with proxy_process.running(around.places) as proxy:
        if call == "unpublish":
            await _again(around, "publish", target)
        gate = around.driver.gates[method] = fake_driver.Gate()
        asked = asyncio.create_task(_request(around, call, target))
        await nodes.until(gate.entered)
        await proxy.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await asked
    gate.opened.set()
    del around.driver.gates[method]
    async with proxy_process.running(around.places):
        await _again(around, call, target)
        if call == "publish":
            around.check_published(target)
            await _again(around, "unpublish", target)
        around.check_untouched(target)


async def test_a_sandbox_does_not_notice_and_is_still_protected(around: Around) -> None:
    target = around.places.target("one")
    async with proxy_process.running(around.places) as proxy:
        await _again(around, "publish", target)
        await proxy.kill()
    with fake_handler.sandbox(around.places.volumes, target, name="box-7"):
        async with proxy_process.running(around.places):
            with pytest.raises(grpc.aio.AioRpcError, match="box-7"):
                await around.co.unpublish("vol-1", target)
            answer = await around.co.stats("vol-1", target)
            assert answer.usage[0].total == 1000
            around.check_published(target)
