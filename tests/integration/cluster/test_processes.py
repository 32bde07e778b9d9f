"""One controller without root and three node drivers, all as real programs, with an etcd and a pool each."""

import asyncio
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.cluster.etcd.client.certificates import Files
from crust.host.block import loop, loop_devices
from crust.host.mounts import mount_api, mountinfo
from crust.rpc import channel
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.cluster import etcd as members
from examples.cluster.etcd import Etcd
from tests.support.cluster.central_cluster import all_of, refused
from tests.support.cluster.programs import READY_S, Program, until
from tests.support.drivers.block_driver import MIB, mount

pytestmark = pytest.mark.root

NODES = ("n1", "n2", "n3")
KEY = "crust.dev/node"
NOBODY = "65534"
Code = grpc.StatusCode
PENDING = (Code.UNAVAILABLE, Code.ABORTED, Code.DEADLINE_EXCEEDED)
"""A sidecar repeats a call that ends so."""


class Cluster:
    """The programs, and stubs to them."""

    def __init__(self, base: Path, etcd: Etcd, stack: AsyncExitStack) -> None:
        self.base = base
        self._etcd = etcd
        self._stack = stack
        self.nodes = {
            node: Program(base / f"{node}.log", "driver", *self._node(node)) for node in NODES
        }
        self.controllers = {
            name: Program(base / name / "log", "driver", *self._controller(name), user=NOBODY)
            for name in ("c1", "c2")
        }

    def _node(self, node: str) -> Sequence[str]:
        root = self.base / node
        for each in ("kubelet", "run"):
            (root / each).mkdir(parents=True, exist_ok=True)
        return (
            "--mode", "node", "--node-id", node, "--socket", f"{root}/csi.sock",
            "--state-dir", f"{root}/pool", "--create-pool", "--run-dir", f"{root}/run",
            "--target-root", f"{root}/kubelet", "--no-check-propagation", *self._cluster(node),
        )  # fmt: skip

    def _controller(self, name: str) -> Sequence[str]:
        root = self.base / name
        root.mkdir(mode=0o700)
        return (
            "--mode", "controller", "--socket", f"{root}/csi.sock", "--run-dir", f"{root}/run",
            *(self._cluster if name == "c1" else self._cluster_by_flags)("controller"),
        )  # fmt: skip

    def _cluster(self, user: str) -> Sequence[str]:
        files = self._readable(user)
        config = self.base / f"{user}.toml"
        config.write_text(
            f'[cluster]\nendpoints = ["{self._etcd.members[0].address}"]\nlease_s = 3\nsettle_s = 3\n'
            f'ca = "{files.ca}"\ncert = "{files.cert}"\nkey = "{files.key}"\n'
        )
        config.chmod(0o644)
        return ("--config", str(config))

    def _cluster_by_flags(self, user: str) -> Sequence[str]:
        files = self._readable(user)
        return (
            "--cluster", "etcd", "--cluster-endpoint", self._etcd.members[0].address,
            "--cluster-ca", files.ca, "--cluster-cert", files.cert, "--cluster-key", files.key,
        )  # fmt: skip

    def _readable(self, user: str) -> Files:
        """Copies that the controller's user may read, as its pod's secret would be."""
        made = self._etcd.files(user)
        names = []
        for each in (made.ca, made.cert, made.key):
            copy = self.base / f"{user}-{Path(each).name}"
            shutil.copyfile(each, copy)
            copy.chmod(0o644)
            names.append(str(copy))
        return Files(*names)

    def images(self) -> list[str]:
        """The volumes of all pools, in order."""
        pools = [self.base / node / "pool" / "images" for node in NODES]
        return sorted(image.stem for pool in pools for image in pool.iterdir())

    async def stub(self, kind: type[Any], name: str) -> Any:
        """A stub to the program `name`."""
        opened = channel.connect(f"{self.base}/{name}/csi.sock")
        await self._stack.enter_async_context(opened)
        return kind(opened)

    async def leads(self, name: str) -> None:
        """Wait until a controller leads and knows all nodes."""
        identity = await self.stub(csi_pb2_grpc.IdentityStub, name)
        controller = await self.stub(csi_pb2_grpc.ControllerStub, name)

        async def is_ready() -> bool:
            return bool((await identity.Probe(csi_pb2.ProbeRequest())).ready.value)

        async def has(node: str) -> bool:
            at = csi_pb2.GetCapacityRequest()
            at.accessible_topology.segments[KEY] = node
            return bool((await controller.GetCapacity(at)).available_capacity)

        try:
            async with asyncio.timeout(READY_S):
                await until(is_ready)
                for node in NODES:
                    await until(partial(has, node))
        except TimeoutError:
            logs = [each.log for each in (*self.nodes.values(), self.controllers[name])]
            raise AssertionError("\n".join(logs)) from None


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """All programs but the second controller, running."""
    base = Path(tempfile.mkdtemp(prefix="crust-cluster-"))
    base.chmod(0o755)
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, base)
        stack.callback(_clean, base)
        etcd = stack.enter_context(members.running(tmp_path, nodes=NODES))
        cluster = Cluster(base, etcd, stack)
        for program in (*cluster.nodes.values(), cluster.controllers["c1"]):
            await program.start()
            stack.push_async_callback(program.end)
        await cluster.leads("c1")
        yield cluster


def _clean(base: Path) -> None:
    for each in sorted(mountinfo.below(str(base)), key=lambda each: -len(each.target)):
        mount_api.unmount(each.target)
    for device in loop_devices.list_all():
        if device.backing.startswith(f"{base}/"):
            loop.detach(device)


def wanted(name: str, *nodes: str) -> csi_pb2.CreateVolumeRequest:
    request = csi_pb2.CreateVolumeRequest(
        name=name,
        volume_capabilities=[csi.capability_to_wire(mount())],
        capacity_range=csi_pb2.CapacityRange(required_bytes=64 * MIB),
    )
    for node in nodes:
        request.accessibility_requirements.requisite.add().segments[KEY] = node
    return request


async def created(controller: Any, request: csi_pb2.CreateVolumeRequest) -> Any:
    """CreateVolume as external-provisioner does it: again while the answer is not final."""
    async with asyncio.timeout(READY_S):
        while True:
            try:
                return (await controller.CreateVolume(request, timeout=10)).volume
            except grpc.aio.AioRpcError as error:
                if error.code() not in PENDING:
                    raise
                await asyncio.sleep(0.2)


async def test_life_of_a_volume_through_a_controller_without_root(cluster: Cluster) -> None:
    controller = await cluster.stub(csi_pb2_grpc.ControllerStub, "c1")
    volumes = {node: await created(controller, wanted(f"pvc-{node}", node)) for node in NODES}
    for node, volume in volumes.items():
        assert dict(volume.accessible_topology[0].segments) == {KEY: node}
        images = list((cluster.base / node / "pool" / "images").iterdir())
        assert [each.stem for each in images] == [volume.volume_id]
    volume = volumes["n2"]
    publish = csi_pb2.ControllerPublishVolumeRequest(
        volume_id=volume.volume_id,
        node_id="n2",
        volume_capability=csi.capability_to_wire(mount()),
    )
    await controller.ControllerPublishVolume(publish)
    target = await mounted(cluster, "n2", volume)
    (Path(target) / "file").write_text("written")
    expand = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id,
        capacity_range=csi_pb2.CapacityRange(required_bytes=128 * MIB),
        volume_capability=csi.capability_to_wire(mount()),
    )
    grown = await controller.ControllerExpandVolume(expand)
    assert grown.capacity_bytes == 128 * MIB
    snapshot = csi_pb2.CreateSnapshotRequest(name="s", source_volume_id=volume.volume_id)
    taken = (await controller.CreateSnapshot(snapshot)).snapshot
    copy = wanted("copy")
    copy.capacity_range.required_bytes = 128 * MIB
    copy.volume_content_source.snapshot.snapshot_id = taken.snapshot_id
    restored = await created(controller, copy)
    assert dict(restored.accessible_topology[0].segments) == {KEY: "n2"}
    listed = (await controller.ListVolumes(csi_pb2.ListVolumesRequest())).entries
    assert {each.volume.volume_id for each in listed} == {
        restored.volume_id,
        *(each.volume_id for each in volumes.values()),
    }
    await unmounted(cluster, "n2", volume, target)
    away = csi_pb2.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id, node_id="n2")
    await controller.ControllerUnpublishVolume(away)
    delete = csi_pb2.DeleteSnapshotRequest(snapshot_id=taken.snapshot_id)
    await controller.DeleteSnapshot(delete)
    for each in (restored, *volumes.values()):
        await controller.DeleteVolume(csi_pb2.DeleteVolumeRequest(volume_id=each.volume_id))
    for node in NODES:
        assert list((cluster.base / node / "pool" / "images").iterdir()) == []
        assert list((cluster.base / node / "pool" / "records").iterdir()) == []


async def test_node_serves_no_controller_calls_on_its_socket(cluster: Cluster) -> None:
    node = await cluster.stub(csi_pb2_grpc.ControllerStub, "n1")
    async with refused(Code.UNIMPLEMENTED):
        await node.CreateVolume(wanted("pvc"))


async def test_killed_node_and_killed_controller_leave_one_volume_per_name(
    cluster: Cluster,
) -> None:
    controller = await cluster.stub(csi_pb2_grpc.ControllerStub, "c1")
    names = [f"pvc-{number}" for number in range(12)]
    creating = [asyncio.create_task(created(controller, wanted(name))) for name in names]
    await asyncio.wait(creating, return_when=asyncio.FIRST_COMPLETED)
    await cluster.nodes["n1"].end()
    await cluster.controllers["c1"].end()
    await cluster.controllers["c2"].start()
    cluster._stack.push_async_callback(cluster.controllers["c2"].end)
    await cluster.nodes["n1"].start()
    for task in creating:
        task.cancel()
    await asyncio.gather(*creating, return_exceptions=True)
    await cluster.leads("c2")
    second = await cluster.stub(csi_pb2_grpc.ControllerStub, "c2")
    volumes = await asyncio.gather(*(created(second, wanted(name)) for name in names))
    assert cluster.images() == sorted(each.volume_id for each in volumes)


async def test_leader_that_slept_for_longer_than_its_lease_leads_no_longer(
    cluster: Cluster,
) -> None:
    """What it was doing goes on when it wakes up, and makes no volume beside those of the new leader."""
    first = await cluster.stub(csi_pb2_grpc.ControllerStub, "c1")
    await cluster.controllers["c2"].start()
    cluster._stack.push_async_callback(cluster.controllers["c2"].end)
    await created(first, wanted("pvc-0"))
    names = [f"pvc-{number}" for number in range(12)]
    asked = [
        asyncio.ensure_future(first.CreateVolume(wanted(name), timeout=READY_S)) for name in names
    ]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    with cluster.controllers["c1"].frozen():
        await cluster.leads("c2")
        second = await cluster.stub(csi_pb2_grpc.ControllerStub, "c2")
        volumes = {name: await created(second, wanted(name)) for name in names}
    for name, answer in zip(names, await all_of(asked), strict=True):
        if isinstance(answer, grpc.aio.AioRpcError):
            assert answer.code() in PENDING, answer.details()
        else:
            assert answer.volume.volume_id == volumes[name].volume_id
    assert await cluster.controllers["c1"].ended() == 1
    assert cluster.controllers["c1"].log.rstrip().endswith("error_name=LeadershipLost")
    assert cluster.images() == sorted(each.volume_id for each in volumes.values())
    await cluster.controllers["c1"].start()
    await cluster.controllers["c2"].end(signal.SIGTERM)
    await cluster.leads("c1")
    again = [await created(first, wanted(name)) for name in names]
    assert [each.volume_id for each in again] == [each.volume_id for each in volumes.values()]


async def test_name_that_is_in_two_pools_since_an_older_copy_of_a_disk_was_used_is_reported(
    cluster: Cluster,
) -> None:
    """The driver of the disk runs throughout. Each of the two is deleted by its id."""
    controller = await cluster.stub(csi_pb2_grpc.ControllerStub, "c1")
    disk = cluster.base / "n1"
    await asyncio.to_thread(shutil.copytree, disk / "pool", disk / "older")
    first = await created(controller, wanted("pvc", "n1"))
    wanted_first = csi_pb2.ControllerGetVolumeRequest(volume_id=first.volume_id)

    async def answers(code: Code) -> bool:
        try:
            await controller.ControllerGetVolume(wanted_first)
        except grpc.aio.AioRpcError as error:
            return error.code() is code
        return code is Code.OK

    async def is_logged(text: str) -> bool:
        return text in cluster.controllers["c1"].log

    swap(disk, out="newer", to="older")
    await asyncio.wait_for(until(partial(answers, Code.NOT_FOUND)), READY_S)
    lacking = "a pool lacks volumes that are recorded there"
    await asyncio.wait_for(until(partial(is_logged, lacking)), READY_S)
    second = await created(controller, wanted("pvc", "n2"))
    assert second.volume_id != first.volume_id
    swap(disk, out="older", to="newer")
    await asyncio.wait_for(until(partial(answers, Code.OK)), READY_S)
    await asyncio.wait_for(until(partial(is_logged, "one name is in two pools")), READY_S)
    for each in (first, second):
        await controller.DeleteVolume(csi_pb2.DeleteVolumeRequest(volume_id=each.volume_id))
    assert cluster.images() == []


def swap(disk: Path, *, out: str, to: str) -> None:
    """Take the pool away as `out`, and put the copy `to` in its place."""
    (disk / "pool").rename(disk / out)
    (disk / to).rename(disk / "pool")


async def test_cluster_command_lists_nodes_and_retires_one_that_is_gone(cluster: Cluster) -> None:
    controller = await cluster.stub(csi_pb2_grpc.ControllerStub, "c1")
    volume = await created(controller, wanted("pvc", "n3"))
    rows = {row["node"]: row for row in await cluster_command(cluster, "nodes", "--output=json")}
    assert {node: row["state"] for node, row in rows.items()} == dict.fromkeys(NODES, "ready")
    assert rows["n3"]["free_bytes"] > 0
    assert await cluster_command(cluster, "retire", "n3", code=1) == []
    await cluster.nodes["n3"].end(signal.SIGTERM)
    retired = await cluster_command(cluster, "retire", "n3", code=0)
    assert retired == []
    rows = {row["pool"]: row for row in await cluster_command(cluster, "nodes", "--output=json")}
    assert rows[volume.volume_id.partition("-")[0]]["state"] == "retired"
    delete = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)

    async def is_deleted() -> bool:
        try:
            await controller.DeleteVolume(delete)
        except grpc.aio.AioRpcError as error:
            if error.code() is not Code.UNAVAILABLE:
                raise
            return False
        return True

    await asyncio.wait_for(until(is_deleted), READY_S)


async def cluster_command(cluster: Cluster, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Run `crust cluster`; returns the rows that it printed."""
    config = cluster.base / "operator.toml"
    config.write_text(
        'mode = "controller"\nsocket = "/none"\n' + (cluster.base / "controller.toml").read_text()
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "crust", "cluster", arguments[0], f"--config={config}", *arguments[1:],
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), READY_S)
    assert process.returncode == code, err.decode()
    return json.loads(out)["nodes"] if arguments[0] == "nodes" else []


async def mounted(cluster: Cluster, node: str, volume: Any) -> str:
    """Stage and publish; returns the target."""
    stub = await cluster.stub(csi_pb2_grpc.NodeStub, node)
    root = cluster.base / node / "kubelet"
    (root / "staging").mkdir()
    capability = csi.capability_to_wire(mount())
    common = {
        "volume_id": volume.volume_id,
        "staging_target_path": f"{root}/staging",
        "volume_capability": capability,
        "volume_context": dict(volume.volume_context),
    }
    await stub.NodeStageVolume(csi_pb2.NodeStageVolumeRequest(**common))
    target = f"{root}/target"
    await stub.NodePublishVolume(csi_pb2.NodePublishVolumeRequest(target_path=target, **common))
    return target


async def unmounted(cluster: Cluster, node: str, volume: Any, target: str) -> None:
    """Unpublish and unstage."""
    stub = await cluster.stub(csi_pb2_grpc.NodeStub, node)
    gone = csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume.volume_id, target_path=target)
    await stub.NodeUnpublishVolume(gone)
    staging = str(cluster.base / node / "kubelet" / "staging")
    await stub.NodeUnstageVolume(
        csi_pb2.NodeUnstageVolumeRequest(volume_id=volume.volume_id, staging_target_path=staging)
    )
