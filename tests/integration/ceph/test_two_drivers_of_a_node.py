"""`crust node` with local volumes and with images of a real Ceph pool: one proxy and one runtime for both."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from crust.core.settings import OWN_DRIVER, loading
from crust.node import node_process
from crust.node.settings import NodeSettings
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph import rbd_driver, rbd_node
from tests.support.co import NAMED, Co, capability
from tests.support.faults.refusals import repeated
from tests.support.nodes.node import Node
from tests.support.nodes.places import Places

pytestmark = pytest.mark.root

SHARED = "rbd.csi.crust.dev"
SETTINGS = """
node_name = "node-1"

[proxy]
run_dir = "{root}/run"
volumes_root = "{root}/run/volumes"
target_roots = ["{root}/kubelet"]
check_propagation = false

[[proxy.drivers]]
name = "{local}"
socket = "{root}/{local}.sock"

[[proxy.drivers]]
name = "{shared}"
socket = "{root}/{shared}.sock"

[[driver]]
state_dir = "{root}/pool"
target_roots = ["{root}/kubelet"]
create_pool = true
check_propagation = false

[[driver]]
mode = "node"
engine = "rbd"
driver_name = "{shared}"
run_dir = "{root}/run/{shared}"
target_roots = ["{root}/kubelet"]
check_propagation = false

[driver.rbd]
monitors = "{monitors}"
pool = "{pool}"
namespace = "{namespace}"
"""


@dataclass(frozen=True)
class TwoDrivers:
    """The node's callers by driver, and the controller and the user of the shared pool."""

    places: Places
    nodes: dict[str, Co]
    controller: Co
    secrets: dict[str, str]

    def sidecars(self, driver: str) -> Co:
        """Where the sidecars of the driver call."""
        return self.controller if driver == SHARED else self.nodes[driver]

    async def create(self, driver: str, name: str) -> csi_pb2.Volume:
        return await rbd_node.created(self.sidecars(driver), name, capability())

    async def stage(self, driver: str, volume: csi_pb2.Volume) -> None:
        """NodeStageVolume, with the Secret that the class of the shared pool names."""
        os.makedirs(self.staging(volume), exist_ok=True)
        await self.nodes[driver].stage(
            volume.volume_id,
            self.staging(volume),
            volume_context=volume.volume_context,
            secrets=self.secrets if driver == SHARED else {},
        )

    async def publish(self, driver: str, volume: csi_pb2.Volume, target: str) -> None:
        await self.nodes[driver].publish(
            volume.volume_id,
            target,
            staging=self.staging(volume),
            volume_context=NAMED,
            secrets=self.secrets if driver == SHARED else {},
        )

    async def leave(self, driver: str, volume: csi_pb2.Volume, target: str) -> None:
        await self.nodes[driver].unpublish(volume.volume_id, target)
        await self.nodes[driver].unstage(volume.volume_id, self.staging(volume))
        sidecars = self.sidecars(driver)
        # a pool that did not answer is looked at again once per period
        await repeated(lambda: sidecars.delete(volume.volume_id), while_named="[PoolNotOpened]")

    def staging(self, volume: csi_pb2.Volume) -> str:
        return f"{self.places.kubelet}/{volume.volume_id}"


@pytest.fixture
async def both(ceph: CephCluster) -> AsyncIterator[TwoDrivers]:
    """The node, running, and one runtime."""
    namespace = ceph.make_namespace()
    with (
        tempfile.TemporaryDirectory(prefix="crust-") as root,
        rbd_driver.serving(ceph, within=namespace) as controller,
    ):
        places, guest = Places.make(root), f"guest-{namespace}"
        where = {"monitors": ceph.monitors, "pool": POOL, "namespace": namespace}
        toml = SETTINGS.format(root=root, local=OWN_DRIVER, shared=SHARED, **where)
        settings = loading.load(NodeSettings, "node", toml=toml, environ={}, flags={})
        async with (
            rbd_driver.calling(controller) as co,
            node_process.running(settings),
            Node(places).handler(),
            channel.connect(f"{root}/{OWN_DRIVER}.sock") as to_local,
            channel.connect(f"{root}/{SHARED}.sock") as to_shared,
        ):
            secrets = {"userID": guest, "userKey": ceph.node(guest, namespace)}
            callers = {OWN_DRIVER: Co(to_local), SHARED: Co(to_shared)}
            yield TwoDrivers(places, callers, co, secrets)


async def test_silent_cluster_leaves_local_volumes(both: TwoDrivers, ceph: CephCluster) -> None:
    """More calls than the driver of Ceph has threads wait for it meanwhile."""
    volume = await both.create(SHARED, "data")
    await both.stage(SHARED, volume)
    pool = volume.volume_id.partition("-")[0]
    others = [csi_pb2.Volume(volume_id=f"{pool}-{number:040x}") for number in range(160)]
    target, local_target = both.places.target("shared"), both.places.target("local")
    with ceph.osd.frozen():
        waiting = [asyncio.create_task(both.stage(SHARED, other)) for other in others]
        waiting.append(asyncio.create_task(both.publish(SHARED, volume, target)))
        local = await both.create(OWN_DRIVER, "data")
        await both.stage(OWN_DRIVER, local)
        await both.publish(OWN_DRIVER, local, local_target)
        assert [call for call in waiting if call.done() and call.exception() is None] == []
        await both.leave(OWN_DRIVER, local, local_target)
        answers = await asyncio.gather(*waiting, return_exceptions=True)
    refusals = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert {refusal.code() for refusal in refusals} == {grpc.StatusCode.UNAVAILABLE}
    assert len(refusals) == len(answers)
    await both.publish(SHARED, volume, target)  # no thread still hangs
    await both.leave(SHARED, volume, target)
