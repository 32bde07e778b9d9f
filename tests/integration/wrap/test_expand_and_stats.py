"""Expansion and statistics of a wrapped volume: the block layer by the driver, the filesystem by whoever has it."""

import os
from pathlib import Path

import grpc
import pytest

from crust.host.block import devices
from crust.wire.csi.v1 import csi_pb2
from tests.integration.wrap.conftest import TIMEOUT_S, Wrapped, node_with
from tests.support.co import MIB
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.root
Code = grpc.StatusCode


async def test_driver_grows_the_device_as_block(cloud: Wrapped) -> None:
    volume, target = await cloud.published_volume()
    assert await cloud.expand(volume, target, 96 * MIB) == 96 * MIB
    (asked,) = cloud.driver.calls("NodeExpandVolume")
    paths = cloud.paths(volume)
    assert (asked.volume_path, asked.staging_target_path) == (paths.leaf(target), paths.staging)
    assert asked.volume_capability.HasField("block")
    assert not asked.defer_fs_ops
    record = cloud.record(target)
    assert devices.size_bytes(record.device) == record.mount.capacity_bytes == 96 * MIB


async def test_staged_volume_is_published_while_it_grows(cloud: Wrapped) -> None:
    """A kubelet expands between stage and publish."""
    volume, target = await cloud.staged_volume()
    assert await cloud.expand(volume, cloud.staging(volume), 96 * MIB) == 96 * MIB
    assert cloud.driver.names()[-3:] == [
        "NodePublishVolume", "NodeExpandVolume", "NodeUnpublishVolume",
    ]  # fmt: skip
    cloud.check_unpublished(volume, target)
    await cloud.publish(volume, target)
    assert cloud.record(target).mount.capacity_bytes == 96 * MIB


async def test_expansion_without_a_path_is_refused(cloud: Wrapped) -> None:
    volume = await cloud.volume()
    await cloud.stage(volume)
    request = csi_pb2.NodeExpandVolumeRequest(volume_id=volume.volume_id)
    calls = cloud.driver.names()
    await refused(
        cloud.node.NodeExpandVolume(request, timeout=60),
        grpc.StatusCode.INVALID_ARGUMENT,
        "volume_path",
    )
    assert cloud.driver.names() == calls


async def test_failed_expansion_leaves_a_staged_volume_unpublished(cloud: Wrapped) -> None:
    volume, target = await cloud.staged_volume()
    cloud.driver.misbehave(NodeExpandVolume="fail INTERNAL no rescan")
    await refused(cloud.expand(volume, cloud.staging(volume), 96 * MIB), Code.INTERNAL, "no rescan")
    cloud.check_unpublished(volume, target)


@pytest.mark.parametrize("kind", ["cloud", "minimal"])
async def test_expansion_of_an_ordinary_volume_is_the_drivers(kind: str) -> None:
    async with node_with(kind) as node:
        volume, target = await node.volume(context={}), node.target("one")
        deferred, other = await node.volume("deferred"), node.target("other")
        await node.stage(volume)
        await node.publish(volume, target)
        request = csi_pb2.NodeExpandVolumeRequest(
            volume_id=volume.volume_id,
            volume_path=target,
            capacity_range=csi_pb2.CapacityRange(required_bytes=64 * MIB),
        )
        if kind == "minimal":  # nothing is deferred, so nothing was advertised that it has not
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await node.node.NodeExpandVolume(request, timeout=TIMEOUT_S)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await node.stage(deferred)
        await node.publish(deferred, other)
        asked = len(node.driver.names())
        answer = await node.node.NodeExpandVolume(request, timeout=TIMEOUT_S)
        assert answer.capacity_bytes == 64 * MIB
        assert ("NodeExpandVolume" in node.driver.names()[asked:]) is (kind == "cloud")


async def test_capabilities_are_the_drivers_while_nothing_is_deferred(node: Wrapped) -> None:
    async def advertised() -> set[int]:
        answer = await node.node.NodeGetCapabilities(
            csi_pb2.NodeGetCapabilitiesRequest(), timeout=TIMEOUT_S
        )
        return {each.rpc.type for each in answer.capabilities}

    rpc = csi_pb2.NodeServiceCapability.RPC
    before = await advertised()
    volume, target = await node.published_volume()
    assert await advertised() == before | {rpc.GET_VOLUME_STATS, rpc.EXPAND_VOLUME}
    await node.unpublish(volume, target)
    await node.unstage(volume)
    assert await advertised() == before
    assert not before & {rpc.VOLUME_MOUNT_GROUP, rpc.SINGLE_NODE_MULTI_WRITER}


async def test_secrets_of_a_stage_are_in_no_file(cloud: Wrapped) -> None:
    volume, _ = await cloud.published_volume()
    found = [
        path
        for place in (cloud.places.kubelet, cloud.places.run)
        for path in Path(place).rglob("*")
        if path.is_file() and b"correct-token" in path.read_bytes()
    ]
    assert found == []
    assert os.stat(cloud.paths(volume).staging).st_mode & 0o7777 == 0o1750
