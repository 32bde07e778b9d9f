"""EXPAND_VOLUME is advertised for a driver whose nodes need nothing for it, before anything of a volume is here."""

import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from crust.core import deferral_keys
from crust.csi_shim.wrap import private_directories
from crust.csi_shim.wrap.advertised import Advertised
from crust.csi_shim.wrap.frontend import Wrapping
from crust.rpc import channel
from crust.rpc.driver_facts import DriverFacts
from crust.rpc.port import SocketPort
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.co import Co
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import MIB, FakeDriver
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Places

Code = grpc.StatusCode
RPC = csi_pb2.NodeServiceCapability.RPC


@dataclass
class Kubelet:
    """A caller of the shim."""

    driver: FakeDriver
    places: Places
    shim: grpc.aio.Channel

    @property
    def node(self) -> "csi_pb2_grpc.NodeAsyncStub":
        return csi_pb2_grpc.NodeStub(self.shim)

    async def advertised(self) -> set[int]:
        request = csi_pb2.NodeGetCapabilitiesRequest()
        answer = await self.node.NodeGetCapabilities(request, timeout=10)
        return {each.rpc.type for each in answer.capabilities}

    async def expand(self, volume_id: str, path: str) -> int:
        return (await Co(self.shim).expand(volume_id, path, 96 * MIB)).capacity_bytes


@pytest.fixture
async def kubelet() -> AsyncIterator[Kubelet]:
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        places, driver = Places.make(root), FakeDriver(defers=False)
        driver.expands_at_node = False
        async with (
            fake_driver.serving(driver, places.driver),
            nodes.shim(places, wrapping=Wrapping(places.kubelet)),
            channel.connect(places.shim) as shim,
        ):
            yield Kubelet(driver, places, shim)


async def test_expand_volume_is_advertised_where_the_plugin_grows_volumes(kubelet: Kubelet) -> None:
    """The controller's shim requires the node's part for every mounted volume."""
    kubelet.driver.expands = True
    assert await kubelet.advertised() == {RPC.STAGE_UNSTAGE_VOLUME, RPC.EXPAND_VOLUME}


async def test_expand_volume_is_not_advertised_where_no_volume_grows(kubelet: Kubelet) -> None:
    assert await kubelet.advertised() == {RPC.STAGE_UNSTAGE_VOLUME}


async def test_expand_volume_of_the_driver_is_advertised_once(kubelet: Kubelet) -> None:
    kubelet.driver.expands = kubelet.driver.expands_at_node = True
    assert await kubelet.advertised() == {RPC.STAGE_UNSTAGE_VOLUME, RPC.EXPAND_VOLUME}


async def test_expansion_that_the_driver_need_not_do_is_checked(kubelet: Kubelet) -> None:
    kubelet.driver.expands = True
    target = kubelet.places.target("one")
    await refused(kubelet.expand("vol-1", target), Code.NOT_FOUND, "NoVolumeAt", target)
    await refused(kubelet.expand("", target), Code.INVALID_ARGUMENT, "volume_id")
    await refused(kubelet.expand("vol-1", "a/b"), Code.INVALID_ARGUMENT, "volume_path")
    os.mkdir(target)
    assert await kubelet.expand("vol-1", target) == 96 * MIB
    assert kubelet.driver.called("NodeExpandVolume") == []


async def test_capabilities_with_own_stats_and_expand_skip_directory_scan(kubelet: Kubelet) -> None:
    async def look() -> bool:
        raise AssertionError("a volume was looked for")

    has_both = frozenset({RPC.GET_VOLUME_STATS, RPC.EXPAND_VOLUME})
    async with SocketPort(kubelet.places.shim) as port:
        advertised = Advertised(DriverFacts(port), look)
        own = await advertised.beside(has_both, opted_in=True, left_s=None)
    assert RPC.DEFER_FS_OPS in own
    assert not has_both.intersection(own)


async def test_volumes_are_looked_for_after_an_operation_and_not_for_each_question(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    look = private_directories.has_volumes

    def counted(kubelet_root: str) -> bool:
        looks.append(look(kubelet_root))
        return looks[-1]

    monkeypatch.setattr(private_directories, "has_volumes", counted)
    before = [await kubelet.advertised(), await kubelet.advertised()]
    assert RPC.GET_VOLUME_STATS not in before[0]
    assert before[0] == before[1]
    assert looks == [False]
    path = f"{kubelet.places.kubelet}/staging"
    await Co(kubelet.shim).stage("vol-1", path, volume_context={deferral_keys.DEFER: "always"})
    assert RPC.GET_VOLUME_STATS in await kubelet.advertised()
    assert RPC.GET_VOLUME_STATS in await kubelet.advertised()
    assert looks == [False, True]
    unstage = csi_pb2.NodeUnstageVolumeRequest(volume_id="vol-1", staging_target_path=path)
    await kubelet.node.NodeUnstageVolume(unstage, timeout=10)
    assert await kubelet.advertised() == before[0]
    assert looks == [False, True, False]
