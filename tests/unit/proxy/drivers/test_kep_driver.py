"""A driver that calls RuntimeStageVolume itself, behind a CSI socket of the proxy's: its volumes are the CO's."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from crust import errors, volumes
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import runtime_pb2, types_pb2
from tests.support.drivers.fake_driver import Failure, Gate
from tests.support.drivers.kep_driver import KepDriver
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes
from tests.support.nodes.fake_targets import FakeDevices, FakeTargets
from tests.support.nodes.node import NAMED, Node, Places, until
from tests.support.runtimes import fake_handler

Code = grpc.StatusCode


@pytest.fixture(params=["unflagged", "flagged"])
def driver(request: pytest.FixtureRequest, places: Places) -> KepDriver:
    """Flagged: it advertises DEFER_FS_OPS, and the volume's context asks for deferral."""
    return KepDriver(places.sockets.runtime, defers=request.param == "flagged")


@pytest.fixture
async def node(places: Places, driver: KepDriver) -> AsyncIterator[Node]:
    """No shim: the proxy calls the driver's own socket. One handler."""
    async with (
        nodes.running(places, driver=driver, backend=places.driver) as running,
        running.handler(),
    ):
        yield running


async def _publish(node: Node, target: str, volume_id: str = "vol-1") -> None:
    defer = {"crust.dev/defer": "always"} if node.driver.defers else {}
    await node.co.publish(volume_id, target, defer=False, volume_context={**NAMED, **defer})


def _check_published(node: Node, target: str, volume_id: str = "vol-1") -> None:
    record = node.record(target)
    assert record.key == volumes.VolumeKey(
        volumes.DriverName(nodes.DRIVER), volumes.VolumeId(volume_id)
    )
    assert record.staged_by_driver
    assert node.targets.has_guard(volumes.TargetPath(target))


@pytest.mark.spec("D-45")
async def test_volume_is_published_under_the_cos_id_with_a_guard_and_unpublished(
    node: Node,
) -> None:
    target = node.places.target("one")
    for _ in range(2):
        await _publish(node, target)
        _check_published(node, target)
    for _ in range(2):
        await node.co.unpublish("vol-1", target)
        node.check_untouched(target)
    assert len(node.driver.called("NodeUnpublishVolume")) == 2


@pytest.mark.spec("D-46")
async def test_driver_that_leaves_the_unstage_to_the_proxy_is_unpublished_as_well(
    node: Node, driver: KepDriver
) -> None:
    driver.unstages = False
    target = node.places.target("one")
    await _publish(node, target)
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_unstage_and_unpublish_are_refused_while_a_sandbox_has_the_volume(node: Node) -> None:
    target = node.places.target("one")
    await _publish(node, target)
    unstage = csi_pb2.NodeUnstageVolumeRequest(volume_id="vol-1", staging_target_path="/stage")
    with node.sandbox(target, name="box-7"):
        await refused(
            node.co.node.NodeUnstageVolume(unstage, timeout=10), Code.FAILED_PRECONDITION, target
        )
        await refused(node.co.unpublish("vol-1", target), Code.FAILED_PRECONDITION, "box-7")
        assert node.driver.called("NodeUnpublishVolume") == []
    await node.co.unpublish("vol-1", target)
    await node.co.node.NodeUnstageVolume(unstage, timeout=10)


@pytest.mark.spec("D-46")
async def test_statistics_and_expansion_come_from_the_sandbox(
    places: Places, driver: KepDriver
) -> None:
    fake = fake_handler.FakeHandler()
    devices = FakeDevices(sizes_bytes={"/dev/kep0": 1 << 20})
    async with (
        nodes.running(places, driver=driver, backend=places.driver, devices=devices) as node,
        node.handler(fake=fake),
    ):
        target = places.target("one")
        await _publish(node, target)
        with node.sandbox(target):
            if not driver.defers:
                (usage,) = (await node.co.stats("vol-1", target)).usage
                assert (usage.total, usage.used) == (1000, 400)
            answer = await node.co.expand("vol-1", target, 1 << 20)
            assert answer.capacity_bytes == 1 << 20
        assert [each[0] for each in fake.expansions] == [target]
        await node.co.unpublish("vol-1", target)


async def test_second_target_of_the_device_is_refused_and_leaves_nothing(node: Node) -> None:
    one, two = node.places.target("one"), node.places.target("two")
    await _publish(node, one)
    with pytest.raises(grpc.aio.AioRpcError, match="DeviceReserved"):
        await _publish(node, two, "vol-2")
    assert node.entry(two) is None
    assert not node.targets.has_guard(volumes.TargetPath(two))
    _check_published(node, one)


@pytest.mark.spec("D-47")
async def test_publish_that_the_driver_fails_after_its_stage_leaves_nothing(
    node: Node, driver: KepDriver
) -> None:
    target = node.places.target("one")
    driver.fails_after_stage = Failure(Code.INTERNAL, "broken")
    await refused(_publish(node, target), Code.INTERNAL, "broken")
    assert node.entry(target) is None
    assert not node.targets.has_guard(volumes.TargetPath(target))


@pytest.mark.spec("D-47")
async def test_publish_that_fails_with_a_non_final_code_keeps_what_the_driver_staged(
    node: Node, driver: KepDriver
) -> None:
    target = node.places.target("one")
    driver.fails_after_stage = Failure(Code.UNAVAILABLE, "lost")
    await refused(_publish(node, target), Code.UNAVAILABLE, "lost")
    _check_published(node, target)
    driver.fails_after_stage = None
    await _publish(node, target)
    _check_published(node, target)
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def test_failed_publish_that_a_sandbox_has_claimed_already_is_not_final(
    node: Node, driver: KepDriver
) -> None:
    target = node.places.target("one")
    gate = Gate()

    async def wait() -> None:
        gate.entered.set()
        await gate.opened.wait()

    driver.after_stage = wait
    driver.fails_after_stage = Failure(Code.INTERNAL, "broken")
    publishing = asyncio.ensure_future(_publish(node, target))
    await until(gate.entered)
    with node.sandbox(target):
        gate.opened.set()
        await refused(publishing, Code.UNAVAILABLE)
        assert node.entry(target) is not None
    driver.fails_after_stage = None
    driver.after_stage = _nothing
    await node.co.unpublish("vol-1", target)
    node.check_untouched(target)


async def _nothing() -> None:
    pass


async def test_stage_after_the_co_gave_up_is_still_the_cos_volume(places: Places) -> None:
    driver = KepDriver(places.sockets.runtime)
    async with (
        nodes.running(places, driver=driver, backend=places.driver) as node,
        node.handler(),
    ):
        target = places.target("one")
        driver.failures["NodePublishVolume"] = Failure(Code.UNAVAILABLE, "still at it")
        await refused(_publish(node, target), Code.UNAVAILABLE)
        await _stage_late(node, target)
        _check_published(node, target)
        await node.co.unpublish("vol-1", target)
        node.check_untouched(target)


async def test_volume_staged_while_nobody_knew_whose_it_is_is_the_volume_that_the_co_names(
    node: Node,
) -> None:
    """The proxy was restarted between the CO's call and the driver's."""
    one, two = node.places.target("one"), node.places.target("two")
    await _stage_late(node, one)
    await node.co.unpublish("vol-1", one)
    node.check_untouched(one)
    await _stage_late(node, two)
    assert not node.record(two).staged_by_driver
    await _publish(node, two)
    _check_published(node, two)
    await node.co.unpublish("vol-1", two)
    node.check_untouched(two)


async def _stage_late(node: Node, target: str) -> None:
    """The driver's call, without one of the CO."""
    request = runtime_pb2.RuntimeStageVolumeRequest(
        volume_target_path=target, volume_backing_path="/dev/kep0", fs_type="ext4"
    )
    request.volume_type.type = types_pb2.VolumeType.BLOCK
    await node.runtime.RuntimeStageVolume(request, timeout=10)


async def test_stage_whose_guard_cannot_be_mounted_leaves_no_entry(places: Places) -> None:
    class Full(FakeTargets):
        full = True

        def mount_guard(self, target: volumes.TargetPath) -> bool:
            if self.full:
                raise errors.RuntimeFailed("no guard", why="the disk is full")
            return super().mount_guard(target)

    targets = Full(places.kubelet)
    driver = KepDriver(places.sockets.runtime)
    async with (
        nodes.running(places, driver=driver, backend=places.driver, targets=targets) as node,
        node.handler(),
    ):
        target = places.target("one")
        with pytest.raises(grpc.aio.AioRpcError, match="no guard"):
            await _publish(node, target)
        assert node.entry(target) is None
        targets.full = False
        await _publish(node, target)
        _check_published(node, target)
