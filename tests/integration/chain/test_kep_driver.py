"""A driver that calls RuntimeStageVolume itself, behind the proxy, on the real kernel: guard, claim and refusals."""

import os
from collections.abc import AsyncIterator

import grpc
import pytest

from crust import volumes
from crust.host.block import devices
from crust.host.mounts import mount_api, mountinfo
from crust.proxy.deferrals import targets
from crust.runtime_handler import claim_volume
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.kep_driver import KepDriver
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes
from tests.support.nodes.node import NAMED, Node, Places

pytestmark = pytest.mark.root
Code = grpc.StatusCode


@pytest.fixture
async def node(places: Places, device: str) -> AsyncIterator[Node]:
    driver = KepDriver(places.sockets.runtime)
    driver.device = device
    guarded = targets.GuardedTargets([places.kubelet])
    async with (
        nodes.running(
            places, driver=driver, targets=guarded, devices=devices, backend=places.driver
        ) as running,
        running.handler(),
    ):
        yield running


async def test_volume_that_its_driver_staged_is_guarded_claimed_and_unpublished(node: Node) -> None:
    target = node.places.target("one")
    for _ in range(2):
        await node.co.publish("vol-1", target, defer=False, volume_context=NAMED)
    mount = mountinfo.at(target)
    assert mount is not None
    assert mount_api.is_guard(mount)
    written = os.open(f"{target}/data", os.O_WRONLY | os.O_CREAT, 0o600)
    with pytest.raises(OSError, match="No space left"):
        os.write(written, b"x")
    os.close(written)
    unstage = csi_pb2.NodeUnstageVolumeRequest(
        volume_id="vol-1", staging_target_path=f"{node.places.kubelet}/staging"
    )
    claim = claim_volume(
        node.places.volumes,
        volumes.TargetPath(target),
        volumes.SandboxId("box-1"),
        volumes.HandlerName("kata"),
        features=frozenset(volumes.HandlerFeature),
    )
    with claim:
        await refused(node.co.unpublish("vol-1", target), Code.FAILED_PRECONDITION, "box-1")
        await refused(
            node.co.node.NodeUnstageVolume(unstage, timeout=60), Code.FAILED_PRECONDITION, target
        )
        other = node.places.target("two")
        publish = node.co.publish("vol-2", other, defer=False, volume_context=NAMED)
        await refused(publish, Code.FAILED_PRECONDITION, target)
        assert mountinfo.at(other) is None
    for _ in range(2):
        await node.co.unpublish("vol-1", target)
    assert mountinfo.at(target) is None
    assert not os.path.lexists(target)
    assert node.places.entries() == []
    await node.co.node.NodeUnstageVolume(unstage, timeout=60)
