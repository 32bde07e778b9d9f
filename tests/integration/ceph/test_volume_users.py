"""A node without any key of its own: each volume's user comes with the calls, and a restart forgets it."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.blockdriver.engines.rbd.node import volume_users
from crust.blockdriver.engines.rbd.node.volume_users import VolumeUsers
from crust.blockdriver.engines.rbd.provisioning.images import VolumeImages
from crust.core.volumes import VolumeId
from crust.rpc import channel
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph import rbd_driver
from tests.support.ceph.rbd_driver import RbdDriver
from tests.support.co import capability, create_request, publish_request, stage_request
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.timeout(240)

OPT_IN = (("crust-extensions", "deferral"),)
SIZE = 64 << 20
VOLUME = capability(mode="SINGLE_NODE_MULTI_WRITER")
NOT_READY = grpc.StatusCode.FAILED_PRECONDITION


@dataclass
class Node:
    """The node's driver, which is killed and started again, and the calls that a kubelet makes."""

    ceph: CephCluster
    namespace: str
    base: Path
    driver: RbdDriver
    controller: Any
    keys: dict[str, dict[str, str]] = field(default_factory=dict)

    def secrets(self, user: str) -> dict[str, str]:
        """A user's secrets; the user is made."""
        name = f"{user}-{self.namespace}"
        self.keys[user] = {"userID": name, "userKey": self.ceph.node(name, self.namespace)}
        return self.keys[user]

    async def restart(self) -> None:
        """SIGKILL, start, and wait until it is ready: with no key."""
        self.driver.kill()
        self.driver.start()
        await self.ready()

    async def ready(self) -> None:
        async with asyncio.timeout(60), self.connected() as connected:
            identity = csi_pb2_grpc.IdentityStub(connected)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await identity.Probe(
                        csi_pb2.ProbeRequest(), timeout=30, wait_for_ready=True
                    )
                    if answer.ready.value:
                        return
                await asyncio.sleep(0.1)

    def connected(self) -> Any:
        return channel.connect(str(self.driver.socket))

    async def call(self, name: str, request: Any) -> Any:
        async with self.connected() as connected:
            stub = csi_pb2_grpc.NodeStub(connected)
            return await getattr(stub, name)(request, timeout=60, metadata=OPT_IN)

    def path(self, name: str) -> str:
        return str(self.base / name)

    async def stage(self, volume: str, secrets: dict[str, str]) -> None:
        staging = Path(self.path(f"staging-{volume}"))
        staging.mkdir(exist_ok=True)
        request = stage_request(volume, str(staging), VOLUME, secrets=secrets)
        await self.call("NodeStageVolume", request)

    async def publish(self, volume: str, secrets: dict[str, str]) -> Any:
        target, staging = self.path(f"target-{volume}"), self.path(f"staging-{volume}")
        request = publish_request(volume, target, VOLUME, staging=staging, secrets=secrets)
        return await self.call("NodePublishVolume", request)

    async def expand(self, volume: str, secrets: dict[str, str]) -> Any:
        request = csi_pb2.NodeExpandVolumeRequest(
            volume_id=volume,
            volume_path=self.path(f"target-{volume}"),
            defer_fs_ops=True,
            secrets=secrets,
        )
        return await self.call("NodeExpandVolume", request)

    async def stats(self, volume: str) -> Any:
        request = csi_pb2.NodeGetVolumeStatsRequest(
            volume_id=volume, volume_path=self.path(f"target-{volume}")
        )
        return await self.call("NodeGetVolumeStats", request)

    async def unpublish(self, volume: str) -> None:
        request = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=volume, target_path=self.path(f"target-{volume}")
        )
        await self.call("NodeUnpublishVolume", request)

    async def unstage(self, volume: str) -> None:
        request = csi_pb2.NodeUnstageVolumeRequest(
            volume_id=volume, staging_target_path=self.path(f"staging-{volume}")
        )
        await self.call("NodeUnstageVolume", request)

    async def create(self, name: str) -> str:
        """A volume, once the manager has told the capacity."""
        request = create_request(name, VOLUME)
        async with asyncio.timeout(60):
            while True:
                try:
                    made = await self.controller.CreateVolume(request, timeout=60)
                except grpc.aio.AioRpcError as err:
                    if "CephStatisticsMissing" not in (err.details() or ""):
                        raise
                    await asyncio.sleep(0.5)
                else:
                    return str(made.volume.volume_id)

    def notes(self) -> list[str]:
        """The volumes that are noted as attached."""
        return [each.name for each in (self.base / "node").glob("rbd/*/*")]

    async def until_connected_as(self, *users: str) -> None:
        """Wait until of our users these have a connection, and no others."""
        ours = {each["userID"] for each in self.keys.values()}
        async with asyncio.timeout(60):
            while True:
                if self.ceph.connected_users() & ours == set(users):
                    return
                await asyncio.sleep(0.1)

    def check_no_key_anywhere(self) -> None:
        """No file of the driver, its log, command line and environment have a key."""
        pid = int(self.driver.pid.read_text())
        files = [each for each in self.base.rglob("*") if each.is_file()]
        files += [Path(f"/proc/{pid}/{each}") for each in ("cmdline", "environ")]
        assert self.driver.log.read_bytes(), "nothing is logged"
        for each in files:
            data = each.read_bytes()
            for secrets in self.keys.values():
                assert secrets["userKey"].encode() not in data, each


@pytest.fixture
async def node(ceph: CephCluster) -> AsyncIterator[Node]:
    namespace = ceph.make_namespace()
    with tempfile.TemporaryDirectory(prefix="crust-") as name:
        base, of_controller = Path(name) / "node", Path(name) / "controller"
        of_controller.mkdir(mode=0o700)
        base.mkdir(mode=0o700)
        user = f"controller-{namespace}"
        config = rbd_driver.write_config(
            of_controller, ceph, user, ceph.controller(user, namespace), namespace
        )
        controller = RbdDriver(of_controller, config)
        config = rbd_driver.write_config_without_key(base, ceph, namespace)
        driver = RbdDriver(base, config, mode="node", name="node")
        async with contextlib.AsyncExitStack() as held:
            for each in (controller, driver):
                each.write()
                each.start()
                held.callback(each.kill)
            connected = await held.enter_async_context(channel.connect(str(controller.socket)))
            it = Node(ceph, namespace, base, driver, csi_pb2_grpc.ControllerStub(connected))
            await it.ready()
            await Node(ceph, namespace, base, controller, None).ready()
            yield it


async def test_node_without_a_key_serves_what_needs_none_and_refuses_a_stage_with_the_remedy(
    node: Node,
) -> None:
    volume = await node.create("one")
    info = await node.call("NodeGetInfo", csi_pb2.NodeGetInfoRequest())
    assert info.node_id == "node-of-the-tests"
    assert (
        await node.call("NodeGetCapabilities", csi_pb2.NodeGetCapabilitiesRequest())
    ).capabilities
    await refused(node.stage(volume, {}), NOT_READY, "CephKeyMissing", "node-stage-secret-name")
    assert node.notes() == []
    await node.unpublish(volume)
    await node.unstage(volume)


async def test_life_of_a_volume_with_a_restart_between_its_steps(node: Node) -> None:
    volume, secrets = await node.create("one"), node.secrets("guest")
    await node.stage(volume, secrets)
    assert node.notes() == [volume]
    await node.restart()
    await refused(node.publish(volume, {}), NOT_READY, "CephKeyMissing", "node-publish-secret-name")
    answer = await node.publish(volume, secrets)
    assert answer.deferred_mount.secrets["userKey"] == secrets["userKey"]
    assert csi.deferred_mount(answer.deferred_mount).image is not None
    await node.restart()
    await refused(node.stats(volume), NOT_READY, "CephKeyNotGiven")
    await refused(node.expand(volume, {}), NOT_READY, "CephKeyMissing")
    assert (await node.expand(volume, secrets)).capacity_bytes >= SIZE
    await refused(node.stats(volume), NOT_READY, "VolumeMountedInGuest")
    await node.restart()
    await node.unpublish(volume)
    await node.restart()
    await node.unstage(volume)
    assert node.notes() == []
    node.check_no_key_anywhere()


async def test_wrong_key_is_refused_by_name_and_takes_no_place_of_a_right_one(node: Node) -> None:
    volume, other = await node.create("one"), await node.create("two")
    secrets = node.secrets("guest")
    wrong = {**node.secrets("stranger"), "userID": secrets["userID"]}
    code = grpc.StatusCode.PERMISSION_DENIED
    await refused(node.stage(volume, wrong), code, "CephKeyRefused")
    await refused(node.stage(volume, {}), NOT_READY, "CephKeyMissing")
    await node.stage(volume, secrets)
    await refused(node.stage(other, wrong), code, "CephKeyRefused")
    assert node.notes() == [volume]
    answer = await node.publish(volume, secrets)
    assert answer.deferred_mount.secrets["userKey"] == secrets["userKey"]
    node.check_no_key_anywhere()


async def test_user_that_does_not_reach_the_pool_is_not_kept(node: Node) -> None:
    volume = await node.create("one")
    elsewhere = node.ceph.make_namespace()
    name = f"guest-{elsewhere}"
    foreign = {"userID": name, "userKey": node.ceph.node(name, elsewhere)}
    node.keys["foreign"] = foreign
    await refused(
        node.stage(volume, foreign), grpc.StatusCode.PERMISSION_DENIED, "CephNotPermitted"
    )
    await node.until_connected_as()
    await refused(node.stage(volume, {}), NOT_READY, "CephKeyMissing")


async def test_unstage_is_not_blocked_by_a_key_that_the_cluster_refuses_by_now(node: Node) -> None:
    volume, secrets = await node.create("one"), node.secrets("guest")
    await node.stage(volume, secrets)
    await node.restart()
    node.ceph.command("auth rm", entity=f"client.{secrets['userID']}")
    await refused(
        node.publish(volume, secrets), grpc.StatusCode.PERMISSION_DENIED, "CephKeyRefused"
    )
    await node.unpublish(volume)
    await node.unstage(volume)
    assert node.notes() == []


async def test_volumes_have_users_of_their_own_and_each_goes_with_its_last_volume(
    node: Node,
) -> None:
    volumes = [await node.create(each) for each in ("one", "two", "three")]
    users = [node.secrets("a"), node.secrets("b")]
    pairs = list(zip(volumes, (users[0], users[1], users[0]), strict=True))
    for volume, secrets in pairs:
        await node.stage(volume, secrets)
        image = csi.deferred_mount((await node.publish(volume, secrets)).deferred_mount).image
        assert image is not None
        assert image.user == secrets["userID"]
    names = [each["userID"] for each in users]
    await node.until_connected_as(*names)
    for volume in volumes[:2]:
        await node.unpublish(volume)
        await node.unstage(volume)
    await node.until_connected_as(names[0])
    await node.unpublish(volumes[2])
    await node.unstage(volumes[2])
    await node.until_connected_as()
    node.check_no_key_anywhere()


async def test_key_that_was_changed_takes_the_place_of_the_old_one(node: Node) -> None:
    volume, before = await node.create("one"), node.secrets("guest")
    await node.stage(volume, before)
    node.ceph.command("auth rm", entity=f"client.{before['userID']}")
    after = node.secrets("guest")
    assert after != before
    answer = await node.publish(volume, after)
    assert answer.deferred_mount.secrets["userKey"] == after["userKey"]
    await node.unpublish(volume)
    await node.unstage(volume)


async def test_connections_are_bounded_and_opened_again_for_their_volumes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_users, "MOST_OPEN", 1)
    volumes = [VolumeId(await node.create(each)) for each in ("one", "two")]
    users = VolumeUsers(node.ceph.monitors, POOL, node.namespace, str)
    try:
        for volume, each in zip(volumes, (node.secrets("a"), node.secrets("b")), strict=True):
            await asyncio.to_thread(users.use, volume, each)
            await node.until_connected_as(each["userID"])
        images = VolumeImages(users.place(volumes[0]))
        assert await asyncio.to_thread(images.own_size_bytes, volumes[0]) >= SIZE
    finally:
        await asyncio.to_thread(users.let_go)
    await node.until_connected_as()
