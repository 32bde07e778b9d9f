"""What a driver serves by its mode, over its socket."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from crust.blockdriver import serve
from crust.blockdriver.services.roles import Role
from crust.host.process import syscalls
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.co import Co
from tests.support.drivers import driver_state
from tests.support.faults.refusals import refused

UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
_Rpc = csi_pb2.ControllerServiceCapability.RPC
_Service = csi_pb2.PluginCapability.Service
Serve = Callable[[Role], AbstractAsyncContextManager[Co]]


@pytest.fixture
def served(tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def serving(role: Role) -> AsyncIterator[Co]:
        driver, socket = driver_state.built(tmp_path, role=role), str(tmp_path / "csi.sock")
        async with (
            serve.running(driver, socket=socket, run_dir=str(tmp_path / "run")),
            channel.connect(socket) as connected,
        ):
            yield Co(connected)

    return serving


async def services(co: Co) -> set[int]:
    answer = await co.identity.GetPluginCapabilities(csi_pb2.GetPluginCapabilitiesRequest())
    return {
        capability.service.type
        for capability in answer.capabilities
        if capability.HasField("service")
    }


async def test_node_serves_no_rpc_of_a_controller_and_reports_none(served: Serve) -> None:
    async with served(Role("node")) as co:
        asked = csi_pb2.ControllerGetCapabilitiesRequest()
        capabilities = co.controller.ControllerGetCapabilities(asked)
        await refused(capabilities, UNIMPLEMENTED, "runs in mode node")
        await refused(co.create(), UNIMPLEMENTED, "NotServedInMode")
        await refused(co.group("v"), UNIMPLEMENTED)
        metadata = csi_pb2_grpc.SnapshotMetadataStub(co.channel)
        listed = metadata.GetMetadataAllocated(csi_pb2.GetMetadataAllocatedRequest())
        await refused(listed.read(), UNIMPLEMENTED)
        assert await services(co) == {_Service.VOLUME_ACCESSIBILITY_CONSTRAINTS}
        assert (await co.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest())).node_id == "node-1"


async def test_controller_serves_no_rpc_of_a_node(served: Serve, tmp_path: Path) -> None:
    async with served(Role("controller")) as co:
        info = co.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest())
        await refused(info, UNIMPLEMENTED, "mode controller")
        capabilities = co.node.NodeGetCapabilities(csi_pb2.NodeGetCapabilitiesRequest())
        await refused(capabilities, UNIMPLEMENTED)
        assert (await co.create()).volume_id
        assert _Service.CONTROLLER_SERVICE in await services(co)
    assert not (tmp_path / "run" / syscalls.boot_id()).exists()


async def test_node_deployment_serves_nothing_that_any_node_may_get(served: Serve) -> None:
    async with served(Role("all", node_deployment=True)) as co:
        answer = await co.controller.ControllerGetCapabilities(
            csi_pb2.ControllerGetCapabilitiesRequest(),
            metadata=(("crust-extensions", "deferral,node-info"),),
        )
        advertised = {capability.rpc.type for capability in answer.capabilities}
        assert {_Rpc.CREATE_DELETE_VOLUME, _Rpc.GET_CAPACITY, _Rpc.CREATE_DELETE_SNAPSHOT} <= (
            advertised
        )
        assert not advertised & {
            _Rpc.EXPAND_VOLUME,
            _Rpc.MODIFY_VOLUME,
            _Rpc.PUBLISH_UNPUBLISH_VOLUME,
            _Rpc.PUBLISH_READONLY,
            _Rpc.LIST_VOLUMES_PUBLISHED_NODES,
            _Rpc.GET_NODE_INFO,
        }
        made = await co.create()
        for call in (
            co.attach(made.volume_id, "node-1"),
            co.grow(made.volume_id, 0),
            co.modify(made.volume_id),
        ):
            await refused(call, UNIMPLEMENTED, "node_deployment")
        capacity = csi_pb2.GetCapacityRequest(accessible_topology=made.accessible_topology[0])
        answered = await co.controller.GetCapacity(capacity)
        assert answered.available_capacity > 0
        assert answered.HasField("maximum_volume_size")
        elsewhere = csi_pb2.Topology(segments={"crust.dev/node": "node-2"})
        assert await co.capacity(accessible_topology=elsewhere) == 0
