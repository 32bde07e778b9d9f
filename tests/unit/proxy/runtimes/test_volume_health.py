"""NodeGetVolumeHealth of a deferred volume has what the driver reports and what the guest reports."""

import grpc
import pytest

from crust.core import errors, volumes
from crust.proxy.runtime_api import REASON
from crust.runtime_handler.registration import Feature
from crust.wire.csi.v1 import csi_pb2
from tests.support.faults.refusals import refused
from tests.support.nodes.node import Node
from tests.support.runtimes.fake_handler import ALL_FEATURES, FakeHandler

Code = grpc.StatusCode
LOST = csi_pb2.VolumeHealth.VolumeHealthEntry(
    status=csi_pb2.DATA_LOSS, reason="ImageMissing", message="the image is gone"
)
READ_ONLY = volumes.VolumeCondition(abnormal=True, message="remounted read-only")
AWAY = errors.PeerUnavailable("the guest", why="it hangs")


async def reported(node: Node, volume_id: str, target: str) -> dict[str, str]:
    """Reason to message."""
    request = csi_pb2.NodeGetVolumeHealthRequest(volume_id=volume_id, volume_publish_path=target)
    found = (await node.co.node.NodeGetVolumeHealth(request, timeout=10)).volume_health
    assert found.volume_id == volume_id
    return {each.reason: each.message for each in found.health_statuses}


@pytest.mark.spec("D-40")
async def test_health_is_the_drivers_and_the_guests(node: Node) -> None:
    target = node.places.target("one")
    fake = FakeHandler()
    async with node.handler(fake=fake):
        await node.co.publish("vol-1", target)
        with node.sandbox(target):
            assert await reported(node, "vol-1", target) == {}
            fake.condition = READ_ONLY
            assert await reported(node, "vol-1", target) == {REASON: "remounted read-only"}
            node.driver.findings = [LOST]
            assert set(await reported(node, "vol-1", target)) == {REASON, "ImageMissing"}
            assert set(await reported(node, "vol-1", "")) == {REASON, "ImageMissing"}


@pytest.mark.spec("D-40")
async def test_health_is_an_error_if_the_driver_finds_nothing_and_the_guest_is_not_reached(
    node: Node,
) -> None:
    target = node.places.target("one")
    async with node.handler(fake=FakeHandler(error=AWAY)):
        await node.co.publish("vol-1", target)
        with node.sandbox(target):
            await refused(reported(node, "vol-1", target), Code.UNAVAILABLE, "it hangs")
            node.driver.findings = [LOST]
            assert set(await reported(node, "vol-1", target)) == {"ImageMissing"}


async def test_health_without_a_sandbox_is_the_drivers(node: Node) -> None:
    target = node.places.target("one")
    async with node.handler(fake=FakeHandler(error=AWAY)):
        await node.co.publish("vol-1", target)
        assert await reported(node, "vol-1", target) == {}
        assert await reported(node, "vol-2", node.places.target("two")) == {}


async def test_handler_without_the_feature_is_not_asked(node: Node) -> None:
    target = node.places.target("one")
    features = ALL_FEATURES - {Feature.HEALTH, Feature.STATS}
    async with node.handler(fake=FakeHandler(error=AWAY), features=features):
        await node.co.publish("vol-1", target)
        with node.sandbox(target):
            assert await reported(node, "vol-1", target) == {}
            await refused(
                node.co.stats("vol-1", target), Code.FAILED_PRECONDITION, "does not offer STATS"
            )
