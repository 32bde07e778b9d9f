"""The health of a deferred volume: what its driver and its guest report."""

import grpc
import pytest

from crust.core import errors, volumes
from crust.core.volumes import HandlerFeature
from crust.proxy.runtime_api import NOT_GROWN, REASON
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import MIB
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.runtimes.fake_handler import ALL_FEATURES, FakeHandler

Code = grpc.StatusCode
LOST = csi_pb2.VolumeHealth.VolumeHealthEntry(
    status=csi_pb2.DATA_LOSS, reason="ImageMissing", message="the image is gone"
)


READ_ONLY = volumes.VolumeCondition(abnormal=True, message="remounted read-only")


WELL = volumes.VolumeCondition(abnormal=False, message="")
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


@pytest.mark.spec("D-40", "D-26")
@pytest.mark.parametrize("reports", [True, False])
async def test_health_names_filesystem_that_has_its_old_size(
    node: FakeNode, target: str, *, reports: bool
) -> None:
    device, without = fake_driver.device_of("vol-1"), {HandlerFeature.GROW}
    node.devices.sizes_bytes[device] = 64 * MIB
    node.filesystems.sizes_bytes[device] = 32 * MIB
    features = ALL_FEATURES - (without if reports else without | {HandlerFeature.HEALTH})
    async with node.in_sandbox(target, features=features) as fake:
        assert await reported(node, "vol-1", target) == {"FilesystemNotGrown": NOT_GROWN}
        fake.condition = READ_ONLY
        if reports:
            assert await reported(node, "vol-1", target) == {REASON: "remounted read-only"}
        node.filesystems.sizes_bytes[device], fake.condition = 64 * MIB, WELL
        assert await reported(node, "vol-1", target) == {}


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
    features = ALL_FEATURES - {HandlerFeature.HEALTH, HandlerFeature.STATS}
    async with node.in_sandbox(target, FakeHandler(error=AWAY), features=features):
        assert await reported(node, "vol-1", target) == {}
        await refused(
            node.co.stats("vol-1", target), Code.FAILED_PRECONDITION, "does not offer STATS"
        )
