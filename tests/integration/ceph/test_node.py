"""Controller and node as two processes on one Ceph pool: a guest gets the image with the key that a call brought."""

import asyncio
import contextlib
import tempfile
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import rbd

from crust.ceph import claims
from crust.ceph.claim_object import Mode
from crust.rpc import channel
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph import rbd_driver
from tests.support.ceph.image_claims import as_admin
from tests.support.ceph.rbd_driver import RbdDriver
from tests.support.co import capability, create_request, publish_request, stage_request
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.timeout(240)

OPT_IN = (("crust-extensions", "deferral"),)
SIZE = 64 << 20


@dataclass
class Cluster:
    """The stubs of a controller and a node, one volume, and where it is."""

    ceph: CephCluster
    namespace: str
    controller: Any
    node: Any
    connected: grpc.aio.Channel
    """To the controller."""
    secrets: dict[str, str]
    staging: Path
    target: Path
    volume: csi_pb2.Volume

    @staticmethod
    def capability(*, raw: bool = False) -> csi_pb2.VolumeCapability:
        return capability(block=raw, mode="SINGLE_NODE_MULTI_WRITER")

    async def stage(self, *, raw: bool = False) -> None:
        self.staging.mkdir(exist_ok=True)
        await self.node.NodeStageVolume(
            stage_request(
                self.volume.volume_id,
                str(self.staging),
                self.capability(raw=raw),
                volume_context=self.volume.volume_context,
                secrets=self.secrets,
            ),
            timeout=60,
        )

    async def publish(self, *, deferred: bool = True) -> csi_pb2.DeferredMount:
        answer = await self.node.NodePublishVolume(
            publish_request(
                self.volume.volume_id,
                str(self.target),
                self.capability(),
                defer=deferred,
                staging=str(self.staging),
                volume_context=self.volume.volume_context,
            ),
            timeout=60,
            metadata=OPT_IN,
        )
        found: csi_pb2.DeferredMount = answer.deferred_mount
        return found

    async def leave(self) -> None:
        """Unpublish, unstage, delete."""
        await self.node.NodeUnpublishVolume(
            csi_pb2.NodeUnpublishVolumeRequest(
                volume_id=self.volume.volume_id, target_path=str(self.target)
            ),
            timeout=60,
        )
        await self.node.NodeUnstageVolume(
            csi_pb2.NodeUnstageVolumeRequest(
                volume_id=self.volume.volume_id, staging_target_path=str(self.staging)
            ),
            timeout=60,
        )
        await self.delete(self.volume.volume_id)

    def create(self, name: str, **of: Any) -> Any:
        """CreateVolume, of a volume like the one; `of` has what else `create_request` takes."""
        request = create_request(name, self.capability(), **of)
        return self.controller.CreateVolume(request, timeout=60)

    def delete(self, volume_id: str) -> Any:
        request = csi_pb2.DeleteVolumeRequest(volume_id=volume_id)
        return self.controller.DeleteVolume(request, timeout=60)

    def images(self) -> list[str]:
        with self.ceph.ioctx(POOL, self.namespace) as ioctx:
            return list(rbd.RBD().list(ioctx))


@pytest.fixture
async def cluster(ceph: CephCluster) -> AsyncIterator[Cluster]:
    namespace = ceph.make_namespace()
    names = {each: f"{each}-{uuid.uuid4().hex[:6]}" for each in ("controller", "guest")}
    with tempfile.TemporaryDirectory(prefix="crust-") as name:
        async with contextlib.AsyncExitStack() as held:
            stubs = []
            key = ceph.controller(names["controller"], namespace)
            for mode in ("controller", "node"):
                base = Path(name) / mode
                base.mkdir(mode=0o700)
                if mode == "node":
                    config = rbd_driver.write_config_without_key(base, ceph, namespace)
                    text = config.read_text()
                    config.write_text(text.replace(f'["{base}"]', f'["{name}"]'))
                else:
                    config = rbd_driver.write_config(base, ceph, names[mode], key, namespace)
                driver = RbdDriver(base, config, mode=mode)
                driver.write()
                driver.start()
                held.callback(driver.kill)
                connected = await held.enter_async_context(channel.connect(str(driver.socket)))
                stubs.append(connected)
                await _serving(connected)
            controller = csi_pb2_grpc.ControllerStub(stubs[0])
            made = await _created(controller)
            yield Cluster(
                ceph,
                namespace,
                controller,
                csi_pb2_grpc.NodeStub(stubs[1]),
                stubs[0],
                {"userID": names["guest"], "userKey": ceph.node(names["guest"], namespace)},
                Path(name) / "staging",
                Path(name) / "target",
                made.volume,
            )


async def _created(controller: Any) -> Any:
    """A volume, once the manager has told the capacity."""
    request = create_request("one", Cluster.capability())
    async with asyncio.timeout(60):
        while True:
            try:
                return await controller.CreateVolume(request, timeout=60)
            except grpc.aio.AioRpcError as err:
                if "CephStatisticsMissing" not in (err.details() or ""):
                    raise
            await asyncio.sleep(0.5)


async def _serving(connected: grpc.aio.Channel) -> None:
    """Wait until the pool is open."""
    identity = csi_pb2_grpc.IdentityStub(connected)
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await identity.Probe(
                    csi_pb2.ProbeRequest(), timeout=30, wait_for_ready=True
                )
                if answer.ready.value:
                    return
            await asyncio.sleep(0.1)


async def test_guest_gets_the_image_to_format_with_the_key_of_the_stage(cluster: Cluster) -> None:
    await cluster.stage()
    answer = csi.deferred_mount(await cluster.publish())
    assert answer.image is not None
    assert answer.image.cluster == cluster.ceph.fsid
    assert (answer.image.pool, answer.image.namespace) == (POOL, cluster.namespace)
    assert answer.image.image in cluster.images()
    assert answer.image.user == cluster.secrets["userID"]
    assert answer.secrets == {"userKey": cluster.secrets["userKey"]}
    assert answer.format is not None
    assert answer.capacity_bytes >= SIZE
    await cluster.leave()
    assert cluster.images() == []


async def test_host_is_refused_alike_and_nothing_is_left(cluster: Cluster) -> None:
    code = grpc.StatusCode.FAILED_PRECONDITION
    await refused(cluster.stage(raw=True), code, "NoHostDevice")
    await cluster.stage()
    await refused(cluster.publish(deferred=False), code, "NoHostDevice")
    assert not cluster.target.exists()
    await cluster.leave()
    assert cluster.images() == []


async def test_node_answers_the_size_to_which_the_controller_has_grown_the_image(
    cluster: Cluster,
) -> None:
    await cluster.stage()
    await cluster.publish()
    size = csi_pb2.CapacityRange(required_bytes=2 * SIZE)
    await cluster.controller.ControllerExpandVolume(
        csi_pb2.ControllerExpandVolumeRequest(
            volume_id=cluster.volume.volume_id, capacity_range=size
        ),
        timeout=60,
    )
    answer = await cluster.node.NodeExpandVolume(
        csi_pb2.NodeExpandVolumeRequest(
            volume_id=cluster.volume.volume_id,
            volume_path=str(cluster.target),
            capacity_range=size,
            defer_fs_ops=True,
        ),
        timeout=60,
        metadata=OPT_IN,
    )
    assert answer.capacity_bytes == 2 * SIZE
    await cluster.leave()


async def test_stage_is_refused_while_a_sandbox_of_another_node_has_the_image(
    cluster: Cluster,
) -> None:
    image = cluster.volume.volume_id
    with as_admin(cluster.ceph, cluster.namespace, image) as claimed:
        there = claims.Host("elsewhere", "another-machine")
        claims.take(claimed, Mode.WRITER, there, "sandbox-1", "vm-1")
        await refused(
            cluster.stage(), grpc.StatusCode.FAILED_PRECONDITION, "ImageClaimed", "elsewhere"
        )
        claims.give_back(claimed, "vm-1")
        here = claims.Host.this("node-of-the-tests")
        claims.take(claimed, Mode.WRITER, here, "sandbox-2", "vm-2")
        await cluster.stage()
        claims.give_back(claimed, "vm-2")
    await cluster.leave()
