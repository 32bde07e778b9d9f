"""Controller and node of a Ceph pool as two processes, and the CO that calls them; the node has no key of its own.

A call without a volume is about `volume`, which is there from the start, and brings the key of `own`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rbd

from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support import trees
from tests.support.ceph import rbd_driver
from tests.support.ceph.rbd_driver import RbdDriver, ready
from tests.support.co import Co, capability
from tests.support.faults.refusals import repeated

SIZE = 64 << 20
WRITERS = capability(mode="SINGLE_NODE_MULTI_WRITER")
Secrets = dict[str, str]


async def created(co: Co, name: str, *given: csi_pb2.VolumeCapability, **of: Any) -> csi_pb2.Volume:
    """CreateVolume, once the manager of the cluster has told the capacity."""
    capabilities = given or (WRITERS,)
    return await repeated(
        lambda: co.create(name, *capabilities, **of), while_named="CephStatisticsMissing"
    )


@dataclass
class RbdNode:
    """The two drivers, the connections to them, and the users of the images."""

    ceph: CephCluster
    namespace: str
    base: Path
    """The node's directory."""
    controller_driver: RbdDriver
    driver: RbdDriver
    controller: Co
    co: Co
    """Of the node."""
    volume: str = ""
    own: Secrets = field(default_factory=dict)
    keys: dict[str, Secrets] = field(default_factory=dict)
    contexts: dict[str, dict[str, str]] = field(default_factory=dict)

    def secrets(self, user: str) -> Secrets:
        """A user's secrets; the user is made."""
        name = f"{user}-{self.namespace}"
        self.keys[user] = {"userID": name, "userKey": self.ceph.node(name, self.namespace)}
        return self.keys[user]

    async def restart(self) -> None:
        """SIGKILL, start, and wait until the node is ready: with no key."""
        self.driver.kill()
        self.driver.start()
        await ready(self.co)

    def staging(self, volume: str = "") -> Path:
        return self.base / f"staging-{volume or self.volume}"

    def target(self, volume: str = "") -> Path:
        return self.base / f"target-{volume or self.volume}"

    async def create(self, name: str, *given: csi_pb2.VolumeCapability, **of: Any) -> str:
        """CreateVolume; the id."""
        made = await created(self.controller, name, *given, **of)
        self.contexts[made.volume_id] = dict(made.volume_context)
        return made.volume_id

    async def stage(
        self,
        volume: str = "",
        secrets: Secrets | None = None,
        given: csi_pb2.VolumeCapability = WRITERS,
    ) -> None:
        self.staging(volume).mkdir(exist_ok=True)
        await self.co.stage(
            volume or self.volume,
            str(self.staging(volume)),
            given,
            volume_context=self.contexts.get(volume or self.volume, {}),
            secrets=self.own if secrets is None else secrets,
        )

    async def publish(
        self,
        volume: str = "",
        secrets: Secrets | None = None,
        given: csi_pb2.VolumeCapability = WRITERS,
        *,
        deferred: bool = True,
    ) -> csi_pb2.DeferredMount:
        """NodePublishVolume; the key is that of the stage if none is given."""
        answer = await self.co.publish(
            volume or self.volume,
            str(self.target(volume)),
            given,
            defer=deferred,
            staging=str(self.staging(volume)),
            volume_context=self.contexts.get(volume or self.volume, {}),
            secrets=secrets or {},
        )
        return answer.deferred_mount

    async def unpublish(self, volume: str = "") -> None:
        await self.co.unpublish(volume or self.volume, str(self.target(volume)))

    async def unstage(self, volume: str = "") -> None:
        await self.co.unstage(volume or self.volume, str(self.staging(volume)))

    async def delete(self, volume: str = "") -> None:
        await self.controller.delete(volume or self.volume)

    async def leave(self, volume: str = "") -> None:
        await self.unpublish(volume)
        await self.unstage(volume)
        await self.delete(volume)

    async def grow(self, size: int = 2 * SIZE) -> int:
        return (await self.controller.grow(self.volume, size)).capacity_bytes

    async def expand(self, volume: str = "", secrets: Secrets | None = None, size: int = 0) -> int:
        """NodeExpandVolume, deferred; the size in bytes."""
        answer = await self.co.expand(
            volume or self.volume,
            str(self.target(volume)),
            size,
            defer_fs_ops=True,
            secrets=secrets or {},
        )
        return answer.capacity_bytes

    async def is_confirmed(
        self, volume: str = "", given: csi_pb2.VolumeCapability = WRITERS
    ) -> bool:
        return await self.controller.confirms(volume or self.volume, given)

    async def snapshot(self, name: str = "snapshot") -> str:
        """CreateSnapshot; the id."""
        return (await self.controller.snapshot(self.volume, name)).snapshot_id

    def images(self) -> list[str]:
        """The names of the namespace's images."""
        with self.ioctx() as ioctx:
            return list(rbd.RBD().list(ioctx))

    def ioctx(self) -> Any:
        return self.ceph.ioctx(POOL, self.namespace)

    def notes(self) -> list[str]:
        """The volumes that the node has noted as attached."""
        return [note.name for note in (self.base / self.driver.name).glob("rbd/*/*")]

    async def until_connected_as(self, *users: str) -> None:
        """Wait until of our users these have a connection, and no others."""
        ours = {key["userID"] for key in self.keys.values()}
        async with asyncio.timeout(60):
            while self.ceph.connected_users() & ours != set(users):  # noqa: ASYNC110 - the cluster's list
                await asyncio.sleep(0.1)

    def check_no_key_anywhere(self) -> None:
        """No file of the node, its log, command line and environment have a key."""
        pid = int(self.driver.pid.read_text())
        files = [path for path in self.base.rglob("*") if path.is_file()]
        files += [Path(f"/proc/{pid}/{name}") for name in ("cmdline", "environ")]
        assert self.driver.log.read_bytes(), "nothing is logged"
        for file in files:
            data = file.read_bytes()
            for secrets in self.keys.values():
                assert secrets["userKey"].encode() not in data, file


@contextlib.asynccontextmanager
async def serving(ceph: CephCluster) -> AsyncIterator[RbdNode]:
    """The drivers with a namespace of their own, while the block runs; they have no volume."""
    namespace = ceph.make_namespace()
    with (
        rbd_driver.serving(ceph, within=namespace) as controller,
        trees.temporary("crust-") as name,
    ):
        base = Path(name)
        text = rbd_driver.settings(ceph, namespace=namespace, top=rbd_driver.of_node(base))
        node = rbd_driver.driver_of(base, text, mode="node", name="node")
        with node.running():
            async with (
                rbd_driver.calling(controller) as to_controller,
                rbd_driver.calling(node, waits=True, metadata=extensions.METADATA) as to_node,
            ):
                made = RbdNode(ceph, namespace, base, controller, node, to_controller, to_node)
                await ready(made.controller)
                await ready(made.co)
                yield made
