"""The driver behind its socket: codes, opt-in, and a second driver."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from crust.blockdriver import serve
from crust.blockdriver.controller import topology
from crust.blockdriver.driver import Driver
from crust.blockdriver.driver import build as composed
from crust.core.settings.driver import DEFAULT_MAX_VOLUMES
from crust.host.files import locks
from crust.rpc import channel
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support import volume_capabilities
from tests.support.drivers.block_driver import mount
from tests.support.faults.refusals import refused
from tests.support.records import pool_layout

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("strict_event_loop")]

M = TypeVar("M", bound=Message)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    driver = build(tmp_path)
    async with serve.running(
        driver,
        socket=f"{tmp_path}/csi.sock",
        run_dir=f"{tmp_path}/run",
    ):
        connected = channel.connect(f"{tmp_path}/csi.sock")
        yield connected
        await connected.close()


def build(root: Path) -> Driver:
    return composed(
        create_pool=True,
        state_dir=f"{root}/state",
        run_dir=f"{root}/run",
        node_id="n",
        target_roots=(str(root),),
    )


async def test_deferral_capabilities_need_the_opt_in(served: grpc.aio.Channel) -> None:
    node = csi_pb2_grpc.NodeStub(served)
    plain = await node.NodeGetCapabilities(csi_pb2.NodeGetCapabilitiesRequest())
    known = {capability.rpc.type for capability in plain.capabilities}
    assert max(known) < 10
    opted = await node.NodeGetCapabilities(
        csi_pb2.NodeGetCapabilitiesRequest(), metadata=extensions.METADATA
    )
    assert {capability.rpc.type for capability in opted.capabilities} - known == {
        20526,
        20527,
        20528,
    }
    info = await node.NodeGetInfo(csi_pb2.NodeGetInfoRequest())
    assert (info.node_id, list(info.supported_file_systems)) == ("n", [])
    assert info.max_volumes_per_node == DEFAULT_MAX_VOLUMES
    info = await node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), metadata=extensions.METADATA)
    assert list(info.supported_file_systems) == ["ext4", "xfs", "btrfs"]


@pytest.mark.spec("N-2")
async def test_node_info_capabilities_need_the_opt_in(served: grpc.aio.Channel) -> None:
    node, controller = csi_pb2_grpc.NodeStub(served), csi_pb2_grpc.ControllerStub(served)
    calls: tuple[tuple[Any, Message, set[int]], ...] = (
        (node.NodeGetCapabilities, csi_pb2.NodeGetCapabilitiesRequest(), {20529, 20530}),
        (controller.ControllerGetCapabilities, csi_pb2.ControllerGetCapabilitiesRequest(), {20529}),
    )
    for call, request, added in calls:
        known = {capability.rpc.type for capability in (await call(request)).capabilities}
        opted = (await call(request, metadata=extensions.NODE_INFO_METADATA)).capabilities
        assert {each.rpc.type for each in opted} - known == added
        assert max(known) < 20


@pytest.mark.spec("N-3", "N-4")
async def test_node_info_with_the_flag_is_the_id_alone(served: grpc.aio.Channel) -> None:
    node = csi_pb2_grpc.NodeStub(served)
    request = csi_pb2.NodeGetInfoRequest(controller_get_node_info=True)
    opted = await node.NodeGetInfo(request, metadata=extensions.NODE_INFO_METADATA)
    assert opted == csi_pb2.NodeGetInfoResponse(node_id="n")
    assert (await node.NodeGetID(csi_pb2.NodeGetIDRequest())).node_id == "n"
    complete = [
        await node.NodeGetInfo(request),  # field 1 of a CO that has not opted in may be another one
        await node.NodeGetInfo(
            csi_pb2.NodeGetInfoRequest(), metadata=extensions.NODE_INFO_METADATA
        ),
    ]
    for each in complete:
        assert each.node_id == "n"
        assert each.max_volumes_per_node > 0
        assert dict(each.accessible_topology.segments) == {topology.KEY: "n"}


@pytest.mark.spec("N-5")
@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"node_id": "other"}, grpc.StatusCode.NOT_FOUND),
        ({}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"node_id": "n" * 257}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"node_id": "n\0"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"node_id": "n", "published_volume_ids": [""]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"node_id": "n", "published_volume_ids": ["v" * 129]}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_controller_node_info_refuses_absent_nodes_and_malformed_ids(
    served: grpc.aio.Channel, request_: dict[str, Any], expected: grpc.StatusCode
) -> None:
    call = csi_pb2_grpc.ControllerStub(served).ControllerGetNodeInfo
    await refused(call(csi_pb2.ControllerGetNodeInfoRequest(**request_)), expected)


async def test_ids_of_another_pool_are_not_found_by_deletions(served: grpc.aio.Channel) -> None:
    """To a CO a deletion of what is in no pool is a success; another pool's volume lives on."""
    controller, groups = (
        csi_pb2_grpc.ControllerStub(served),
        csi_pb2_grpc.GroupControllerStub(served),
    )
    volume, snapshot, group = (f"{'0' * 16}-{kind}{'0' * 40}" for kind in ("", "snap-", "group-"))
    calls: list[tuple[Any, Message]] = [
        (controller.DeleteVolume, csi_pb2.DeleteVolumeRequest(volume_id=volume)),
        (
            controller.ControllerUnpublishVolume,
            csi_pb2.ControllerUnpublishVolumeRequest(volume_id=volume),
        ),
        (controller.DeleteSnapshot, csi_pb2.DeleteSnapshotRequest(snapshot_id=snapshot)),
        (
            groups.DeleteVolumeGroupSnapshot,
            csi_pb2.DeleteVolumeGroupSnapshotRequest(
                group_snapshot_id=group, snapshot_ids=[snapshot]
            ),
        ),
    ]
    for method, request in calls:
        await refused(method(request), grpc.StatusCode.NOT_FOUND)
    await controller.DeleteVolume(csi_pb2.DeleteVolumeRequest(volume_id="never-heard-of"))


async def test_second_driver_of_a_pool_is_refused(served: grpc.aio.Channel, tmp_path: Path) -> None:
    with pytest.raises(locks.LockHeld):
        async with serve.running(
            build(tmp_path),
            socket=f"{tmp_path}/other.sock",
            run_dir=f"{tmp_path}/other-run",
        ):
            pytest.fail("a second driver serves the same pool")


async def test_probe_reports_a_missing_folder_and_recovers_without_a_restart(
    served: grpc.aio.Channel, tmp_path: Path
) -> None:
    identity = csi_pb2_grpc.IdentityStub(served)
    folder = tmp_path / "state" / pool_layout.FOLDERS[0]

    async def until(*, ready: bool) -> None:
        async with asyncio.timeout(60):
            while (await identity.Probe(csi_pb2.ProbeRequest())).ready.value != ready:  # noqa: ASYNC110 - a Probe is all that tells
                await asyncio.sleep(0.05)

    folder.rename(tmp_path / "away")
    await until(ready=False)
    assert not folder.exists()
    (tmp_path / "away").rename(folder)
    await until(ready=True)


async def test_absent_things_are_not_found_before_anything_else(served: grpc.aio.Channel) -> None:
    """As csi-sanity and external-snapshotter ask; a known volume is at no relative path."""
    controller, node = csi_pb2_grpc.ControllerStub(served), csi_pb2_grpc.NodeStub(served)
    groups = csi_pb2_grpc.GroupControllerStub(served)
    code = grpc.StatusCode
    create = csi_pb2.CreateVolumeRequest(
        name="v", volume_capabilities=[volume_capabilities.encoded(mount())]
    )
    known = (await controller.CreateVolume(create)).volume.volume_id
    for volume_id, path in itertools.product(("foobar", known), ("some/path", "/a/../b", "/a")):
        stats = csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume_id, volume_path=path)
        await refused(node.NodeGetVolumeStats(stats), code.NOT_FOUND, volume_id)
    for path in ("some/path", "/a"):
        expand = csi_pb2.NodeExpandVolumeRequest(volume_id="foobar", volume_path=path)
        await refused(node.NodeExpandVolume(expand), code.NOT_FOUND, "foobar")
    for volume_id in ("foobar", known):
        stats = csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume_id)
        await refused(node.NodeGetVolumeStats(stats), code.INVALID_ARGUMENT, "volume_path")
    get = csi_pb2.GetVolumeGroupSnapshotRequest(group_snapshot_id="foobar")
    await refused(groups.GetVolumeGroupSnapshot(get), code.NOT_FOUND, "foobar")
    delete = csi_pb2.DeleteVolumeGroupSnapshotRequest(group_snapshot_id="foobar")
    await groups.DeleteVolumeGroupSnapshot(delete)
