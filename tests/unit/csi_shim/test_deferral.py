"""The contract of a shim in front of the socket of a driver that defers."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from crust.rpc import channel
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import Co
from tests.support.drivers.fake_driver import Failure, FakeDriver
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places

Code = grpc.StatusCode
TARGET = "/var/lib/kubelet/pods/one/mount"


@dataclass
class Shim:
    """A shim that serves, what it wraps, and a caller that knows deferral."""

    driver: FakeDriver
    co: Co

    async def publish(self) -> csi_pb2.NodePublishVolumeResponse:
        return await self.co.publish("vol-1", TARGET)


@pytest.fixture
async def shim(places: Places) -> AsyncIterator[Shim]:
    driver = FakeDriver()
    async with (
        FakeNode(places, parts=("driver", "shim"), driver=driver),
        channel.connect(places.shim) as caller,
    ):
        yield Shim(driver, Co(caller, metadata=extensions.METADATA))


@pytest.mark.spec("D-3")
async def test_capabilities_are_reported_only_to_callers_that_opt_in(shim: Shim) -> None:
    asked = csi_pb2.NodeGetCapabilitiesRequest()
    plain = await shim.co.node.NodeGetCapabilities(asked, timeout=10)
    assert all(capability.rpc.type < 20000 for capability in plain.capabilities)
    knows = await shim.co.node.NodeGetCapabilities(
        asked, metadata=(("crust-extensions", "other, deferral"),), timeout=10
    )
    assert 20526 in [capability.rpc.type for capability in knows.capabilities]


@pytest.mark.spec("D-4")
async def test_driver_without_deferral_is_not_called(shim: Shim) -> None:
    shim.driver.defers = False
    words = ("DEFER_FS_OPS", "use a driver that supports deferral")
    await refused(shim.publish(), Code.UNIMPLEMENTED, *words)
    assert shim.driver.called("NodePublishVolume") == []
    shim.driver.defers = True
    await shim.publish()


async def test_code_that_the_driver_sets_is_its_answer(
    shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By set_code and an empty message, as many servicers in Python refuse."""

    async def set_only(failure: Failure, context: Any) -> None:
        context.set_code(failure.code)
        context.set_details(failure.details)

    monkeypatch.setattr(shim.driver, "refuse", set_only)
    shim.driver.alter = lambda answer: answer.Clear()
    shim.driver.failing["NodePublishVolume"] = Failure(Code.RESOURCE_EXHAUSTED, "too many")
    await refused(shim.publish(), Code.RESOURCE_EXHAUSTED, "too many")
    assert shim.driver.called("NodeUnpublishVolume") == []


@pytest.mark.parametrize("path", ["", "relative", "/a/../b"])
async def test_volume_path_that_is_no_target_is_refused(shim: Shim, path: str) -> None:
    stats = shim.co.stats("vol-1", path, defer_fs_ops=True)
    await refused(stats, Code.INVALID_ARGUMENT, "volume_path")
