"""The driver behind its socket: codes, opt-in, and a second driver."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from crust.blockdriver import serve
from crust.blockdriver.controller import topology
from crust.blockdriver.driver import Driver
from crust.blockdriver.driver import build as composed
from crust.blockdriver.engines import files
from crust.blockdriver.settings import DEFAULT_MAX_VOLUMES
from crust.host.files import locks
from crust.rpc import channel
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import KNOWS_NODE_INFO, Co
from tests.support.faults.refusals import refused

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("strict_event_loop")]


@pytest.fixture
async def co(tmp_path: Path) -> AsyncIterator[Co]:
    socket = f"{tmp_path}/csi.sock"
    async with (
        serve.running(build(tmp_path), socket=socket, run_dir=f"{tmp_path}/run"),
        channel.connect(socket) as connected,
    ):
        yield Co(connected)


def build(root: Path) -> Driver:
    return composed(
        engine=files.engine(f"{root}/state", create=True),
        run_dir=f"{root}/run",
        node_id="n",
        target_roots=(str(root),),
    )


async def test_deferral_capabilities_need_the_opt_in(co: Co) -> None:
    request = csi_pb2.NodeGetCapabilitiesRequest()
    plain = await co.node.NodeGetCapabilities(request)
    known = {capability.rpc.type for capability in plain.capabilities}
    assert max(known) < 10
    opted = await co.node.NodeGetCapabilities(request, metadata=extensions.METADATA)
    added = {capability.rpc.type for capability in opted.capabilities} - known
    assert added == {20526, 20527, 20528}
    info = await co.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest())
    assert (info.node_id, list(info.supported_file_systems)) == ("n", [])
    assert info.max_volumes_per_node == DEFAULT_MAX_VOLUMES
    info = await co.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), metadata=extensions.METADATA)
    assert list(info.supported_file_systems) == ["ext4", "xfs", "btrfs"]


@pytest.mark.spec("N-2")
async def test_node_info_capabilities_need_the_opt_in(co: Co) -> None:
    of_controller = csi_pb2.ControllerGetCapabilitiesRequest()
    calls: tuple[tuple[Any, Message, set[int]], ...] = (
        (co.node.NodeGetCapabilities, csi_pb2.NodeGetCapabilitiesRequest(), {20529, 20530}),
        (co.controller.ControllerGetCapabilities, of_controller, {20529}),
    )
    for call, request, added in calls:
        known = {capability.rpc.type for capability in (await call(request)).capabilities}
        opted = (await call(request, metadata=KNOWS_NODE_INFO)).capabilities
        assert {capability.rpc.type for capability in opted} - known == added
        assert max(known) < 20


@pytest.mark.spec("N-3", "N-4")
async def test_node_info_with_the_flag_is_the_id_alone(co: Co) -> None:
    request, opt_in = csi_pb2.NodeGetInfoRequest, KNOWS_NODE_INFO
    flagged, ask = request(controller_get_node_info=True), co.node.NodeGetInfo
    assert await ask(flagged, metadata=opt_in) == csi_pb2.NodeGetInfoResponse(node_id="n")
    assert (await co.node.NodeGetID(csi_pb2.NodeGetIDRequest())).node_id == "n"
    # field 1 of a CO that has not opted in may be another one
    for complete in (await ask(flagged), await ask(request(), metadata=opt_in)):
        assert complete.node_id == "n"
        assert complete.max_volumes_per_node > 0
        assert dict(complete.accessible_topology.segments) == {topology.KEY: "n"}


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
    co: Co, request_: dict[str, Any], expected: grpc.StatusCode
) -> None:
    request = csi_pb2.ControllerGetNodeInfoRequest(**request_)
    await refused(co.controller.ControllerGetNodeInfo(request), expected)


async def test_ids_of_another_pool_are_not_found_by_deletions(co: Co) -> None:
    """To a CO a deletion of what is in no pool is a success; another pool's volume lives on."""
    volume, snapshot, group = (f"{'0' * 16}-{kind}{'0' * 40}" for kind in ("", "snap-", "group-"))
    members = [csi_pb2.Snapshot(snapshot_id=snapshot)]
    foreign = csi_pb2.VolumeGroupSnapshot(group_snapshot_id=group, snapshots=members)
    for call in (
        co.delete(volume),
        co.detach(volume, ""),
        co.delete_snapshot(snapshot),
        co.delete_group(foreign),
    ):
        await refused(call, grpc.StatusCode.NOT_FOUND)
    await co.delete("never-heard-of")


async def test_second_driver_of_a_pool_is_refused(co: Co, tmp_path: Path) -> None:
    other = {"socket": f"{tmp_path}/other.sock", "run_dir": f"{tmp_path}/other-run"}
    with pytest.raises(locks.LockHeld):
        async with serve.running(build(tmp_path), **other):
            pytest.fail("a second driver serves the same pool")


async def test_absent_things_are_not_found_before_anything_else(co: Co) -> None:
    """As csi-sanity and external-snapshotter ask; a known volume is at no relative path."""
    code, known = grpc.StatusCode, (await co.create("v")).volume_id
    for volume_id, path in itertools.product(("foobar", known), ("some/path", "/a/../b", "/a")):
        await refused(co.stats(volume_id, path), code.NOT_FOUND, volume_id)
    for path in ("some/path", "/a"):
        await refused(co.expand("foobar", path, 0), code.NOT_FOUND, "foobar")
    for volume_id in ("foobar", known):
        await refused(co.stats(volume_id, ""), code.INVALID_ARGUMENT, "volume_path")
    get = csi_pb2.GetVolumeGroupSnapshotRequest(group_snapshot_id="foobar")
    await refused(co.groups.GetVolumeGroupSnapshot(get), code.NOT_FOUND, "foobar")
    await co.delete_group(csi_pb2.VolumeGroupSnapshot(group_snapshot_id="foobar"))
