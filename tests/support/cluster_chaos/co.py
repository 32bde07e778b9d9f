"""The CO: the calls that sidecars and kubelets make, each repeated with the same arguments until it succeeds.

A life: create; perhaps use it on its node, snapshot it, grow it; perhaps delete it, and create the same name again.
Whatever a call ends with but success, the CO repeats it: nothing of what was asked for is given up, so at the end
each name is in the state of its last answer. When a volume or snapshot is answered, which image that is goes into the
journal.
"""

import asyncio
import os
import random
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.cluster_chaos import found
from tests.support.cluster_chaos.cluster import Cluster
from tests.support.cluster_chaos.journal import Journal

T = TypeVar("T")
MIB = 1 << 20
SIZE_BYTES = 16 * MIB
GROWN_BYTES = 24 * MIB
CALL_S = 10.0
_PAUSE_S = (0.3, 2.0)
TOPOLOGY = "crust.dev/node"
MOUNT = csi_pb2.VolumeCapability(
    mount=csi_pb2.VolumeCapability.MountVolume(fs_type="ext4"),
    access_mode=csi_pb2.VolumeCapability.AccessMode(
        mode=csi_pb2.VolumeCapability.AccessMode.SINGLE_NODE_WRITER
    ),
)


class Co:
    """Calls all drivers of a cluster. `close` it."""

    def __init__(self, cluster: Cluster, journal: Journal) -> None:
        self.journal = journal
        self.answers: dict[str, int] = {}
        self.engines = cluster.engines
        self._cluster = cluster
        self._looking = ThreadPoolExecutor(16)
        """Ceph may hang for as long as a fault lasts."""
        self._channels = {
            path: channel.connect(path)
            for path in (
                *(each for engine in cluster.engines for each in cluster.sockets(engine)),
                *(cluster.node_socket(each) for each in cluster.nodes),
            )
        }

    async def close(self) -> None:
        """Close the connections."""
        for each in self._channels.values():
            await each.close()
        await asyncio.to_thread(self._looking.shutdown)

    async def ready(self) -> None:
        """Until one controller of each driver serves, and all nodes do."""
        for engine in self._cluster.engines:
            await self.controller(
                engine, lambda stub: stub.ListVolumes(csi_pb2.ListVolumesRequest(), timeout=CALL_S)
            )
        for node in self._cluster.nodes:
            await self.node(
                node, lambda stub: stub.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=CALL_S)
            )

    async def controller(self, engine: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """A controller's call, to both in turn, until one succeeds."""
        stubs = [
            csi_pb2_grpc.ControllerStub(self._channels[each])
            for each in self._cluster.sockets(engine)
        ]
        tries = 0

        def next_try() -> Awaitable[T]:
            nonlocal tries
            tries += 1
            return call(stubs[tries % len(stubs)])

        return await self._until_done(next_try)

    async def node(self, node: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """A node's call, until it succeeds."""
        stub = csi_pb2_grpc.NodeStub(self._channels[self._cluster.node_socket(node)])
        return await self._until_done(lambda: call(stub))

    async def live(self, engine: str, name: str, seed: str) -> csi_pb2.Volume | None:
        """A life of a volume; None if it ends with its deletion."""
        rng = random.Random(seed)
        volume = await self.create(engine, name, rng)
        kept = ""
        if engine == "local" and rng.random() < 0.3:
            await self._use(volume, name)
        if rng.random() < 0.3:
            kept = await self._snapshot(engine, volume, name, keep=rng.random() < 0.6)
        if rng.random() < 0.3:
            await self._grow(engine, volume, name)
        if rng.random() < 0.65:
            return volume
        await self.delete(engine, volume, name)
        if kept and random.Random(f"{seed}-late").random() < 0.5:
            await self._delete_snapshot(engine, name, kept)
        return await self.create(engine, name, rng) if rng.random() < 0.4 else None

    async def create(self, engine: str, name: str, rng: random.Random) -> csi_pb2.Volume:
        """CreateVolume, in any topology or in one of two nodes."""
        request = csi_pb2.CreateVolumeRequest(
            name=name,
            capacity_range=csi_pb2.CapacityRange(required_bytes=SIZE_BYTES),
            volume_capabilities=[MOUNT],
        )
        if engine == "local" and rng.random() < 0.3:
            for node in rng.sample(sorted(self._cluster.nodes), 2):
                request.accessibility_requirements.requisite.add().segments[TOPOLOGY] = node
        self.journal.write("create", engine=engine, name=name)
        answer = await self.controller(
            engine, lambda stub: stub.CreateVolume(request, timeout=CALL_S)
        )
        volume: csi_pb2.Volume = answer.volume
        self.journal.write("created", engine=engine, name=name, id=volume.volume_id)
        which = await self._identity(engine, volume.volume_id)
        self.journal.write("image", engine=engine, name=name, identity=which)
        return volume

    async def delete(self, engine: str, volume: csi_pb2.Volume, name: str) -> None:
        """DeleteVolume."""
        self.journal.write("delete", engine=engine, name=name, id=volume.volume_id)
        request = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
        await self.controller(engine, lambda stub: stub.DeleteVolume(request, timeout=CALL_S))
        self.journal.write("deleted", engine=engine, name=name, id=volume.volume_id)

    async def _snapshot(self, engine: str, volume: csi_pb2.Volume, name: str, *, keep: bool) -> str:
        """Take a snapshot; the id of one that is kept."""
        snapshot = f"snap-of-{name}"
        request = csi_pb2.CreateSnapshotRequest(name=snapshot, source_volume_id=volume.volume_id)
        self.journal.write("snapshot", engine=engine, name=snapshot)
        answer = await self.controller(
            engine, lambda stub: stub.CreateSnapshot(request, timeout=CALL_S)
        )
        id_ = answer.snapshot.snapshot_id
        self.journal.write("snapshotted", engine=engine, name=snapshot, id=id_)
        which = await self._identity(engine, volume.volume_id, id_)
        self.journal.write("snapshot-image", engine=engine, name=snapshot, identity=which)
        if keep:
            return str(id_)
        await self._delete_snapshot(engine, name, id_)
        return ""

    async def _delete_snapshot(self, engine: str, name: str, id_: str) -> None:
        snapshot = f"snap-of-{name}"
        self.journal.write("delete-snapshot", engine=engine, name=snapshot, id=id_)
        gone = csi_pb2.DeleteSnapshotRequest(snapshot_id=id_)
        await self.controller(engine, lambda stub: stub.DeleteSnapshot(gone, timeout=CALL_S))
        self.journal.write("deleted-snapshot", engine=engine, name=snapshot, id=id_)

    async def _identity(self, engine: str, volume_id: str, snapshot_id: str = "") -> str:
        """Which image it is, by the pool itself; "" if it is not there."""
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(
                    self._looking, self._look, engine, volume_id, snapshot_id
                )
            except ConnectionError:
                await asyncio.sleep(_PAUSE_S[1])

    def _look(self, engine: str, volume_id: str, snapshot_id: str) -> str:
        if engine == "rbd":
            return found.identity(self._cluster.ceph_place, volume_id, snapshot_id)
        mark = secrets.token_hex(8)
        pools = (self._cluster.pool(each) for each in self._cluster.nodes)
        return next(
            filter(None, (found.marked(p, snapshot_id or volume_id, mark) for p in pools)), ""
        )

    async def _grow(self, engine: str, volume: csi_pb2.Volume, name: str) -> None:
        request = csi_pb2.ControllerExpandVolumeRequest(
            volume_id=volume.volume_id,
            capacity_range=csi_pb2.CapacityRange(required_bytes=GROWN_BYTES),
            volume_capability=MOUNT,
        )
        await self.controller(
            engine, lambda stub: stub.ControllerExpandVolume(request, timeout=CALL_S)
        )
        self.journal.write("grown", engine=engine, name=name, size=GROWN_BYTES)

    async def _use(self, volume: csi_pb2.Volume, name: str) -> None:
        """Stage, publish, write a mark, unpublish, unstage: on the node where the volume is."""
        node = volume.accessible_topology[0].segments[TOPOLOGY]
        kubelet = self._cluster.base / node / "kubelet"
        staging, target = kubelet / "staging" / name, kubelet / "pods" / name / "mount"
        staging.mkdir(parents=True)
        target.parent.mkdir(parents=True)
        given: Any = {"volume_id": volume.volume_id, "staging_target_path": str(staging)}
        stage = csi_pb2.NodeStageVolumeRequest(**given, volume_capability=MOUNT)
        await self.node(node, lambda stub: stub.NodeStageVolume(stage, timeout=CALL_S))
        publish = csi_pb2.NodePublishVolumeRequest(
            **given, target_path=str(target), volume_capability=MOUNT
        )
        await self.node(node, lambda stub: stub.NodePublishVolume(publish, timeout=CALL_S))
        mark = os.urandom(64).hex()
        await asyncio.to_thread(_write, target / "mark", mark)
        self.journal.write("marked", engine="local", name=name, mark=mark)
        unpublish = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=volume.volume_id, target_path=str(target)
        )
        await self.node(node, lambda stub: stub.NodeUnpublishVolume(unpublish, timeout=CALL_S))
        unstage = csi_pb2.NodeUnstageVolumeRequest(**given)
        await self.node(node, lambda stub: stub.NodeUnstageVolume(unstage, timeout=CALL_S))

    async def _until_done(self, call: Callable[[], Awaitable[T]]) -> T:
        pause = _PAUSE_S[0]
        while True:
            try:
                answer = await call()
            except grpc.aio.AioRpcError as error:
                self._count(error.code())
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise
            else:
                self._count(grpc.StatusCode.OK)
                return answer
            await asyncio.sleep(pause)
            pause = min(pause * 2, _PAUSE_S[1])

    def _count(self, code: grpc.StatusCode) -> None:
        self.answers[code.name] = self.answers.get(code.name, 0) + 1


def _write(path: Path, mark: str) -> None:
    with path.open("w", encoding="ascii") as file:
        file.write(mark * 64)  # larger than what ext4 keeps in an inode
        file.flush()
        os.fsync(file.fileno())
