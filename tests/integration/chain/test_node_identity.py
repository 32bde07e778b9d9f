"""The questions about a node reach our driver alone, behind shim and proxy, as one process with them, and wrapped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import KNOWS_NODE_INFO, Co, capability
from tests.support.drivers import own_driver
from tests.support.drivers.own_driver import MAX_VOLUMES, NODE_ID, OwnDriver
from tests.support.faults.refusals import refused, repeated

pytestmark = pytest.mark.root

CAPABILITY = capability(mode="SINGLE_NODE_SINGLE_WRITER")


@pytest.fixture(params=["alone", "behind-proxy", "node", "wrapped"])
def driver(request: pytest.FixtureRequest, short_dir: Path) -> Iterator[OwnDriver]:
    with own_driver.serving(short_dir, "1.12", request.param) as serving:
        yield serving


@pytest.mark.spec("N-2", "N-4", "N-10")
async def test_driver_answers_about_its_node_through_each_chain(driver: OwnDriver) -> None:
    rpc = csi_pb2.NodeServiceCapability.RPC
    async with channel.connect(str(driver.socket)) as connected:
        co = Co(connected, waits=True)
        opt_in: dict[str, Any] = {"metadata": KNOWS_NODE_INFO, "wait_for_ready": True}
        ask = csi_pb2.NodeGetCapabilitiesRequest()
        answer = await repeated(
            lambda: co.node.NodeGetCapabilities(ask, **opt_in), grpc.StatusCode.UNAVAILABLE
        )
        known = {of.rpc.type for of in answer.capabilities}
        assert {rpc.GET_ID, rpc.NODE_INFO_FROM_CONTROLLER} <= known
        by_id = await co.node.NodeGetID(csi_pb2.NodeGetIDRequest(), **opt_in)
        flagged = csi_pb2.NodeGetInfoRequest(controller_get_node_info=True)
        by_flag = await co.node.NodeGetInfo(flagged, **opt_in)
        info = await co.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest())
        assert by_id.node_id == by_flag.node_id == info.node_id == NODE_ID
        assert (by_flag.max_volumes_per_node, info.max_volumes_per_node) == (0, MAX_VOLUMES)

        names = [f"pvc-{number}" for number in range(MAX_VOLUMES + 1)]
        *attached, last = [(await co.create(name, CAPABILITY)).volume_id for name in names]
        for volume_id in attached:
            await co.attach(volume_id, NODE_ID, CAPABILITY)
        beyond = co.attach(last, NODE_ID, CAPABILITY)
        await refused(beyond, grpc.StatusCode.RESOURCE_EXHAUSTED)
        request = csi_pb2.ControllerGetNodeInfoRequest(node_id=NODE_ID)
        node_info = await co.controller.ControllerGetNodeInfo(request, **opt_in)
        assert sorted(node_info.published_volume_ids) == sorted(attached)
        assert node_info.max_volumes_per_node == MAX_VOLUMES
        assert node_info.accessible_topology == info.accessible_topology
        request.published_volume_ids.append(attached[0])
        node_info = await co.controller.ControllerGetNodeInfo(request, **opt_in)
        assert node_info.max_volumes_per_node == 1, (
            "the other slots are taken by volumes unknown to the CO"
        )
