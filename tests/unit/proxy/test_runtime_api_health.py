"""The health of a deferred volume: what its driver and its guest report."""

import grpc
import pytest

from crust.core import errors, volumes
from crust.proxy.runtime_api import REASON
from crust.runtime_handler.registration import Feature
from crust.wire.csi.v1 import csi_pb2
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.runtimes.fake_handler import ALL_FEATURES, FakeHandler

Code = grpc.StatusCode
LOST = csi_pb2.VolumeHealth.VolumeHealthEntry(
    status=csi_pb2.DATA_LOSS, reason="ImageMissing", message="the image is gone"
)


READ_ONLY = volumes.VolumeCondition(abnormal=True, message="remounted read-only")


AWAY = errors.PeerUnavailable("the guest", why="it hangs")


async def reported(node: FakeNode, volume_id: str, target: str) -> dict[str, str]:
    """Reason to message."""
    request = csi_pb2.NodeGetVolumeHealthRequest(volume_id=volume_id, volume_publish_path=target)
    health = (await node.co.node.NodeGetVolumeHealth(request, timeout=10)).volume_health
    assert health.volume_id == volume_id
    return {entry.reason: entry.message for entry in health.health_statuses}


@pytest.mark.spec("D-40")
async def test_health_is_the_drivers_and_the_guests(node: FakeNode, target: str) -> None:
    async with node.in_sandbox(target) as fake:
        assert await reported(node, "vol-1", target) == {}
        fake.condition = READ_ONLY
        assert await reported(node, "vol-1", target) == {REASON: "remounted read-only"}
        node.driver.node.findings = [LOST]
        assert set(await reported(node, "vol-1", target)) == {REASON, "ImageMissing"}
        assert set(await reported(node, "vol-1", "")) == {REASON, "ImageMissing"}


@pytest.mark.spec("D-40")
async def test_health_without_an_answer_of_the_guest_is_an_error(
    node: FakeNode, target: str
) -> None:
    async with node.in_sandbox(target, FakeHandler(error=AWAY)):
        await refused(reported(node, "vol-1", target), Code.UNAVAILABLE, "it hangs")
        node.driver.node.findings = [LOST]
        assert set(await reported(node, "vol-1", target)) == {"ImageMissing"}


async def test_health_without_a_sandbox_is_the_drivers(node: FakeNode, target: str) -> None:
    async with node.deferred(target, FakeHandler(error=AWAY)):
        assert await reported(node, "vol-1", target) == {}
        assert await reported(node, "vol-2", node.places.target("two")) == {}


async def test_handler_without_the_feature_is_not_asked(node: FakeNode, target: str) -> None:
    features = ALL_FEATURES - {Feature.HEALTH, Feature.STATS}
    async with node.in_sandbox(target, FakeHandler(error=AWAY), features=features):
        assert await reported(node, "vol-1", target) == {}
        await refused(
            node.co.stats("vol-1", target), Code.FAILED_PRECONDITION, "does not offer STATS"
        )
