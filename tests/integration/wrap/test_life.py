"""The life of a deferred volume of a driver that knows nothing of deferral, beside an ordinary one."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import deferral_keys, volumes
from crust.core.operations import KeyedOperations
from crust.host.block import devices
from crust.host.mounts import mountinfo
from crust.wire.csi.v1 import csi_pb2
from tests.integration.wrap.conftest import DEFERRED, Wrapped, node_with
from tests.support.co import MIB
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.root


@pytest.fixture(
    params=["cloud", "minimal", "stateful", "cloud in crust node", "minimal in crust node"]
)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Wrapped]:
    """Each of the drivers, wrapped by two processes and by one."""
    kind, _, one = request.param.partition(" in ")
    async with node_with(kind, is_one_process=bool(one)) as running_node:
        yield running_node


async def test_deferred_volume_from_stage_to_unstage(node: Wrapped) -> None:
    volume, target = await node.published_volume()
    record = node.record(target)
    assert [record.device] == node.driver.attached()
    assert record.mount.fs_type == "ext4"
    assert record.mount.capacity_bytes == 64 * MIB
    with node.sandbox(target) as device:
        assert device == record.device
    await node.unpublish(volume, target)
    node.check_unpublished(volume, target)


@pytest.mark.spec("D-41")
async def test_driver_sees_a_raw_volume_and_no_key_of_crust(node: Wrapped) -> None:
    volume, target = await node.staged_volume(context={**DEFERRED, "vendor": "1"})
    await node.publish(volume, target, readonly=True)
    paths = node.paths(volume)
    (published,) = node.driver.calls("NodePublishVolume")
    asked = node.publish_request(volume, target, readonly=True)
    asked.target_path = paths.leaf(target)
    asked.staging_target_path = paths.staging if node.stages else ""
    asked.volume_capability.block.SetInParent()
    asked.readonly = False
    for key in DEFERRED:
        del asked.volume_context[key]
    assert published == asked
    assert asked.volume_context["vendor"] == "1"
    for staged in node.driver.calls("NodeStageVolume"):
        wanted = node.stage_request(volume)
        wanted.staging_target_path = paths.staging
        wanted.volume_capability.block.SetInParent()
        for key in DEFERRED:
            del wanted.volume_context[key]
        assert staged == wanted
    assert node.record(target).readonly


async def test_ordinary_volume_passes_byte_for_byte_beside_a_deferred_one(node: Wrapped) -> None:
    deferred, ordinary = await node.volume("deferred"), await node.volume("ordinary", context={})
    one, two = node.target("one"), node.target("two")
    await node.stage(deferred)
    await node.publish(deferred, one)
    seen = len(node.driver.raw())
    sent: list[tuple[str, bytes]] = []
    if node.stages:
        await node.stage(ordinary)
        sent.append(("NodeStageVolume", _bytes(node.stage_request(ordinary))))
    await node.publish(ordinary, two)
    sent.append(("NodePublishVolume", _bytes(node.publish_request(ordinary, two))))
    assert mountinfo.stacked_at(two)
    Path(two, "file").write_text("data", encoding="utf-8")
    await node.unpublish(ordinary, two)
    await node.unstage(ordinary)
    received = node.driver.raw()[seen:]
    assert [(name, data) for name, data in received if not name.startswith("NodeUn")] == sent
    assert [name for name, _ in received[len(sent) :]] == (
        ["NodeUnpublishVolume", "NodeUnstageVolume"] if node.stages else ["NodeUnpublishVolume"]
    )


async def test_deferred_publish_without_staging_path_is_refused(cloud: Wrapped) -> None:
    """The driver would not refuse it: the shim has a path of its own for it."""
    volume, target = await cloud.staged_volume()
    asked = cloud.publish_request(volume, target)
    asked.staging_target_path = ""
    await refused(
        cloud.node.NodePublishVolume(asked, timeout=60),
        grpc.StatusCode.FAILED_PRECONDITION,
        "StagingPathNotGiven",
    )
    assert cloud.entry(target) is None


async def test_ordinary_volume_costs_no_look_on_a_thread(
    cloud: Wrapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the proxy nor in the shim, once the kernel knows that there is no private directory and no guard."""
    volume, target = await cloud.volume(context={}), cloud.target("one")
    looks: list[str] = []
    look = KeyedOperations.look

    async def counted(self: KeyedOperations, *args: Any, **named: Any) -> Any:
        looks.append(str(args[0]))
        return await look(self, *args, **named)

    async def lives() -> None:
        for step in cloud.life(volume, target).values():
            await cloud.node.NodeGetCapabilities(csi_pb2.NodeGetCapabilitiesRequest())
            await step()

    await lives()
    monkeypatch.setattr(KeyedOperations, "look", counted)
    for _ in range(3):
        await lives()
    assert looks == []
    deferred = await cloud.volume("deferred")
    for step in cloud.life(deferred, target).values():
        await step()
    assert looks != [], "looks are counted"


async def test_same_publish_again_asks_the_driver_once(node: Wrapped) -> None:
    volume, target = await node.staged_volume()
    for _ in range(3):
        await node.publish(volume, target)
    assert len(node.driver.calls("NodePublishVolume")) == 1


async def test_blank_volume_that_was_created_empty_is_left_to_the_guest(node: Wrapped) -> None:
    context = {**DEFERRED, deferral_keys.CREATED_EMPTY: "true"}
    _volume, target = await node.published_volume(context=context, mkfs=False)
    record = node.record(target)
    assert record.mount.format == volumes.GuestFormat()
    assert devices.is_blank(record.device)


async def test_unpublish_waits_for_a_writer_of_the_device(cloud: Wrapped) -> None:
    """A hypervisor whose runtime has died. The driver would detach the device from it."""
    volume, target = await cloud.published_volume()
    with open(cloud.record(target).device, "r+b", buffering=0):
        await refused(
            cloud.unpublish(volume, target),
            grpc.StatusCode.FAILED_PRECONDITION,
            "DeviceInUse",
            f"[{os.getpid()}] by fd",
        )
        assert cloud.driver.calls("NodeUnpublishVolume") == []


async def test_device_is_the_drivers_own_and_not_devtmpfs(node: Wrapped) -> None:
    volume, target = await node.published_volume()
    leaf = node.paths(volume).leaf(target)
    record = node.record(target)
    assert devices.identify(leaf) == record.mount.source.identity
    assert os.stat(leaf).st_rdev == os.stat(record.device).st_rdev


def _bytes(request: object) -> bytes:
    data: bytes = request.SerializeToString()  # type: ignore[attr-defined]
    return data
