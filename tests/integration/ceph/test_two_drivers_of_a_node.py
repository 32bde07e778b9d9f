"""`crust node` with local volumes and with images of a real Ceph pool: one proxy and one runtime for both."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.core import volumes
from crust.core.settings import OWN_DRIVER, loading
from crust.handoff import store
from crust.node import node_process
from crust.node.settings import NodeSettings
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph import rbd_driver, rbd_node
from tests.support.co import Co, capability
from tests.support.faults.refusals import refused, repeated
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Places
from tests.support.runtimes.fake_handler import FakeHandler
from tests.support.runtimes.fake_handler import running as registered

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

SHARED = "rbd.csi.crust.dev"
TENANT = "rbd-b.csi.crust.dev"
PROCESS = """
node_name = "node-1"

[proxy]
run_dir = "{root}/run"
volumes_root = "{root}/run/volumes"
target_roots = ["{root}/kubelet"]
check_propagation = false
"""
SERVED = """
[[proxy.drivers]]
name = "{name}"
socket = "{root}/{name}.sock"
"""
LOCAL = """
[[driver]]
state_dir = "{root}/pool"
target_roots = ["{root}/kubelet"]
create_pool = true
check_propagation = false
"""
OF_CEPH = """
[[driver]]
mode = "node"
engine = "rbd"
driver_name = "{name}"
run_dir = "{root}/run/{name}"
target_roots = ["{root}/kubelet"]
check_propagation = false

[driver.rbd]
monitors = "{monitors}"
pool = "{pool}"
namespace = "{namespace}"
"""


@dataclass
class TwoDrivers:
    """The node's settings, its callers' connections, and the controllers and users of shared pools, by driver."""

    places: Places
    settings: NodeSettings
    controllers: dict[str, Co]
    secrets: dict[str, dict[str, str]]
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def call(self, driver: str) -> Co:
        connected = channel.connect(f"{self.places.root}/{driver}.sock")
        return Co(await self.stack.enter_async_context(connected))

    async def create(self, driver: str, name: str) -> csi_pb2.Volume:
        """CreateVolume, where the sidecars of the driver call."""
        return await rbd_node.created(await self._controller(driver), name, capability())

    async def stage(self, driver: str, volume: csi_pb2.Volume, *, of: str = "") -> None:
        """NodeStageVolume, with the Secret that the class of the shared pool names."""
        os.makedirs(self.staging(volume), exist_ok=True)
        await (await self.call(driver)).stage(
            volume.volume_id,
            self.staging(volume),
            volume_context=volume.volume_context,
            secrets=self.secrets.get(of or driver, {}),
        )

    async def publish(self, driver: str, volume: csi_pb2.Volume, target: str) -> None:
        await (await self.call(driver)).publish(
            volume.volume_id,
            target,
            staging=self.staging(volume),
            volume_context=nodes.NAMED,
            secrets=self.secrets.get(driver, {}),
        )

    async def leave(self, driver: str, volume: csi_pb2.Volume, target: str) -> None:
        co = await self.call(driver)
        await co.unpublish(volume.volume_id, target)
        await co.unstage(volume.volume_id, self.staging(volume))
        sidecar = await self._controller(driver)
        # a pool that did not answer is looked at again once per period
        await repeated(lambda: sidecar.delete(volume.volume_id), while_named="[PoolNotOpened]")

    async def _controller(self, driver: str) -> Co:
        return self.controllers.get(driver) or await self.call(driver)

    def staging(self, volume: csi_pb2.Volume) -> str:
        return f"{self.places.kubelet}/{volume.volume_id}"

    def record(self, target: str) -> Any:
        entry = store.Store(self.places.volumes).read(volumes.TargetPath(target))
        assert entry is not None
        return entry.require()


@asynccontextmanager
async def _node(ceph: CephCluster, *drivers: str) -> AsyncIterator[TwoDrivers]:
    """A node with these drivers, running, and one runtime. Those of Ceph have a namespace each."""
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        places = Places.make(root)
        async with AsyncExitStack() as stack:
            controllers, secrets = {}, {}
            toml = PROCESS.format(root=root)
            toml += "".join(SERVED.format(root=root, name=each) for each in drivers)
            for name in drivers:
                if name == OWN_DRIVER:
                    toml += LOCAL.format(root=root)
                    continue
                namespace = ceph.make_namespace()
                where = {"monitors": ceph.monitors, "pool": POOL, "namespace": namespace}
                toml += OF_CEPH.format(root=root, name=name, **where)
                driver = stack.enter_context(rbd_driver.serving(ceph, within=namespace))
                controllers[name] = await stack.enter_async_context(rbd_driver.calling(driver))
                guest = f"guest-{namespace}"
                secrets[name] = {"userID": guest, "userKey": ceph.node(guest, namespace)}
            settings = loading.load(NodeSettings, "node", toml=toml, environ={}, flags={})
            await stack.enter_async_context(node_process.running(settings))
            handlers = registered(
                FakeHandler(), proxy_socket=places.sockets.handlers, endpoint=places.handler
            )
            await stack.enter_async_context(handlers)
            yield TwoDrivers(places, settings, controllers, secrets, stack)


@pytest.fixture
async def both(ceph: CephCluster) -> AsyncIterator[TwoDrivers]:
    async with _node(ceph, OWN_DRIVER, SHARED) as running:
        yield running


@pytest.fixture
async def tenants(ceph: CephCluster) -> AsyncIterator[TwoDrivers]:
    """A driver for each tenant of a Ceph pool."""
    async with _node(ceph, SHARED, TENANT) as running:
        yield running


async def test_silent_cluster_leaves_local_volumes(both: TwoDrivers, ceph: CephCluster) -> None:
    """More calls than the driver of Ceph has threads wait for it meanwhile."""
    volume = await both.create(SHARED, "data")
    await both.stage(SHARED, volume)
    pool = volume.volume_id.partition("-")[0]
    others = [csi_pb2.Volume(volume_id=f"{pool}-{each:040x}") for each in range(160)]
    target, local_target = both.places.target("shared"), both.places.target("local")
    with ceph.osd.frozen():
        waiting = [asyncio.create_task(both.stage(SHARED, other)) for other in others]
        waiting.append(asyncio.create_task(both.publish(SHARED, volume, target)))
        local = await both.create(OWN_DRIVER, "data")
        await both.stage(OWN_DRIVER, local)
        await both.publish(OWN_DRIVER, local, local_target)
        assert [each for each in waiting if each.done() and each.exception() is None] == []
        await both.leave(OWN_DRIVER, local, local_target)
        answers = await asyncio.gather(*waiting, return_exceptions=True)
    codes = {answer.code() for answer in answers if isinstance(answer, grpc.aio.AioRpcError)}
    assert codes == {grpc.StatusCode.UNAVAILABLE}
    assert len(answers) == len(
        [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    )
    await both.publish(SHARED, volume, target)  # no thread still hangs
    await both.leave(SHARED, volume, target)


async def test_tenants_reach_no_volume_of_another(tenants: TwoDrivers) -> None:
    """Nothing is set up for a volume: the class of each tenant's driver names the tenant's Secret."""
    published = {}
    for driver in (SHARED, TENANT):
        volume = await tenants.create(driver, "data")
        await tenants.stage(driver, volume)
        published[driver] = volume, tenants.places.target(driver)
        await tenants.publish(driver, *published[driver])
    images = {each: tenants.record(target).image for each, (_, target) in published.items()}
    assert images[SHARED].namespace != images[TENANT].namespace
    assert images[SHARED].user != images[TENANT].user
    mine, _ = published[SHARED]
    more = await tenants.create(SHARED, "more")
    await refused(
        tenants.stage(SHARED, more, of=TENANT),
        grpc.StatusCode.PERMISSION_DENIED,
        "CephNotPermitted",
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # the other driver, with its own Secret
        await tenants.stage(TENANT, mine)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    for driver, (volume, target) in published.items():
        await tenants.leave(driver, volume, target)
