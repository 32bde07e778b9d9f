"""The proxy alone keeps writers apart: the driver behind it refuses nothing.

It gives one device to everybody, and mounts it at any target. So what the own driver refuses by itself cannot
hide a hole in the proxy here.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from crust.host.block import devices
from crust.host.mounts import mount_api
from crust.proxy import guard
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import capability, publish_request
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Context
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Node, Places

pytestmark = pytest.mark.root
Code = grpc.StatusCode


class PermissiveDriver(fake_driver.FakeDriver):
    """Every volume is the same device; a host publish mounts it, whoever has it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    async def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest, context: Context
    ) -> csi_pb2.NodePublishVolumeResponse:
        answer = await super().NodePublishVolume(request, context)
        if request.volume_capability.HasField("block"):
            Path(request.target_path).touch()
            mount_api.bind(self.device, request.target_path, readonly=request.readonly)
        elif not request.defer_fs_ops:
            Path(request.target_path).mkdir()
            mount_api.mount_device(self.device, request.target_path, "ext4")
        return answer

    async def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: Context
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        if not request.defer_fs_ops:
            mount_api.unmount(request.target_path)
            target = Path(request.target_path)
            target.rmdir() if target.is_dir() else target.unlink()
        return await super().NodeUnpublishVolume(request, context)

    def deferred_mount(self, request: csi_pb2.NodePublishVolumeRequest) -> csi_pb2.DeferredMount:
        answer = super().deferred_mount(request)
        found = devices.identify(self.device)
        answer.block_device.path = self.device
        answer.block_device.identity.major = found.major
        answer.block_device.identity.minor = found.minor
        answer.block_device.identity.disk_sequence = found.disk_sequence
        return answer


@pytest.fixture
async def node(places: Places, device: str) -> AsyncIterator[Node]:
    driver = PermissiveDriver(device)
    guarded = guard.Targets([places.kubelet])
    async with (
        nodes.running(places, driver=driver, targets=guarded, devices=devices) as running,
        running.handler(),
    ):
        yield running


@pytest.mark.parametrize("volume_id", ["vol-1", "vol-2"], ids=["same volume", "same device"])
async def test_deferred_publish_beside_a_host_mount_fails(node: Node, volume_id: str) -> None:
    one, two = node.places.target("one"), node.places.target("two")
    await node.co.publish("vol-1", one, defer=False)
    await refused(node.co.publish(volume_id, two), Code.FAILED_PRECONDITION, one)
    node.check_untouched(two)
    await node.co.unpublish("vol-1", one)
    await node.co.publish(volume_id, two)


def raw_request(
    volume_id: str, target: str, *, readonly: bool = False
) -> csi_pb2.NodePublishVolumeRequest:
    """A publish of a raw block volume."""
    return publish_request(
        volume_id, target, capability(block=True), defer=False, readonly=readonly
    )


def raw_target(places: Places) -> str:
    directory = f"{places.kubelet}/plugins/kubernetes.io/csi/volumeDevices/publish/pv-1"
    Path(directory).mkdir(parents=True)
    return f"{directory}/uid-1"


@pytest.mark.parametrize("volume_id", ["vol-1", "vol-2"], ids=["same volume", "same device"])
async def test_deferred_publish_beside_a_raw_one_fails(node: Node, volume_id: str) -> None:
    raw, target = raw_target(node.places), node.places.target("one")
    await node.co.node.NodePublishVolume(raw_request("vol-1", raw), timeout=60)
    await refused(node.co.publish(volume_id, target), Code.FAILED_PRECONDITION, raw)
    node.check_untouched(target)
    await node.co.unpublish("vol-1", raw)
    await node.co.publish(volume_id, target)


async def test_raw_publish_of_an_earlier_proxy_is_seen(places: Places, device: str) -> None:
    driver = PermissiveDriver(device)
    guarded = guard.Targets([places.kubelet])
    raw, target = raw_target(places), places.target("one")
    for began in (False, True):
        async with (
            nodes.running(places, driver=driver, targets=guarded, devices=devices) as node,
            node.handler(),
        ):
            if began:
                await refused(node.co.publish("vol-2", target), Code.FAILED_PRECONDITION, raw)
                await node.co.publish("vol-2", target, readonly=True)
            else:
                request = raw_request("vol-1", raw, readonly=True)
                await node.co.node.NodePublishVolume(request, timeout=60)
