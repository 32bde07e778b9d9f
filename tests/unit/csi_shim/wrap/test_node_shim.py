"""The calls of a node that a shim answers for its driver: what it advertises, and an expansion."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest

from crust.core import deferral_keys
from crust.csi_shim.wrap import private_directories
from crust.csi_shim.wrap.node_shim import Wrapping
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import Co
from tests.support.drivers.fake_driver import MIB, FakeDriver
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places

Code = grpc.StatusCode
RPC = csi_pb2.NodeServiceCapability.RPC


@dataclass
class Kubelet:
    """A caller of the shim."""

    driver: FakeDriver
    places: Places
    co: Co

    async def advertised(self) -> set[int]:
        request = csi_pb2.NodeGetCapabilitiesRequest()
        answer = await self.co.node.NodeGetCapabilities(request, timeout=10)
        types = [capability.rpc.type for capability in answer.capabilities]
        assert len(types) == len(set(types)), "advertised twice"
        return set(types)

    async def expand(self, volume_id: str, path: str) -> int:
        return (await self.co.expand(volume_id, path, 96 * MIB)).capacity_bytes


@pytest.fixture
async def kubelet(places: Places) -> AsyncIterator[Kubelet]:
    driver = FakeDriver(defers=False)
    driver.node_rpcs = [RPC.STAGE_UNSTAGE_VOLUME]
    wrapping = Wrapping(places.kubelet)
    async with (
        FakeNode(places, parts=("driver", "shim"), driver=driver, wrapping=wrapping),
        channel.connect(places.shim) as shim,
    ):
        yield Kubelet(driver, places, Co(shim))


@pytest.mark.parametrize(
    ("expands", "at_node", "advertised"),
    [
        (True, False, {RPC.EXPAND_VOLUME}),  # the controller's shim requires the node's part
        (False, False, set()),
        (True, True, {RPC.EXPAND_VOLUME}),
    ],
)
async def test_expand_volume_is_advertised_once_where_volumes_grow(
    kubelet: Kubelet, *, expands: bool, at_node: bool, advertised: set[int]
) -> None:
    online = csi_pb2.PluginCapability.VolumeExpansion.ONLINE
    kubelet.driver.expansion = [online] if expands else []
    kubelet.driver.node_rpcs += [RPC.EXPAND_VOLUME] if at_node else []
    assert await kubelet.advertised() == {RPC.STAGE_UNSTAGE_VOLUME, *advertised}


async def test_expansion_that_the_driver_need_not_do_is_checked(kubelet: Kubelet) -> None:
    kubelet.driver.expansion = [csi_pb2.PluginCapability.VolumeExpansion.ONLINE]
    target = kubelet.places.target("one")
    await refused(kubelet.expand("vol-1", target), Code.NOT_FOUND, "NoVolumeAt", target)
    await refused(kubelet.expand("", target), Code.INVALID_ARGUMENT, "volume_id")
    await refused(kubelet.expand("vol-1", "a/b"), Code.INVALID_ARGUMENT, "volume_path")
    os.mkdir(target)
    assert await kubelet.expand("vol-1", target) == 96 * MIB
    assert kubelet.driver.called("NodeExpandVolume") == []


async def test_capabilities_with_own_stats_and_expand_skip_directory_scan(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(_: str) -> bool:
        raise AssertionError("a volume was looked for")

    monkeypatch.setattr(private_directories, "has_volumes", look)
    kubelet.driver.node_rpcs += [RPC.GET_VOLUME_STATS, RPC.EXPAND_VOLUME]
    assert await kubelet.advertised() == {*kubelet.driver.node_rpcs}


async def test_statistics_and_growth_are_advertised_while_staged_as_block(
    kubelet: Kubelet,
) -> None:
    before = await kubelet.advertised()
    path = f"{kubelet.places.kubelet}/staging"
    await kubelet.co.stage("vol-1", path, volume_context={deferral_keys.DEFER: "always"})
    added = {RPC.GET_VOLUME_STATS, RPC.EXPAND_VOLUME}
    assert await kubelet.advertised() - before == added
    await kubelet.co.unstage("vol-1", path)
    assert await kubelet.advertised() == before
