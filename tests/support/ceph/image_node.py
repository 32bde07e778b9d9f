"""A node whose volumes are images of a real Ceph cluster: proxy, shim, a driver's answers, and the example runtime.

Proxy, shim and runtime are the real ones, over their sockets, in this process; the guests are QEMU. The driver
answers what a driver of Ceph volumes would: the image and the key of a node's user.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import rbd

from crust.blockdriver.ceph import fencing
from crust.core import volumes
from crust.proxy.guard import Targets
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import inspect_pb2
from examples.cluster.ceph_cluster import POOL, CephCluster
from examples.kata.runtime import daemon
from examples.kata.runtime.client import Client
from examples.kata.runtime.sandbox import Sandbox
from examples.kata.runtime.sandboxes import Sandboxes
from examples.kata.vm.machine import Machine
from tests.support import trees
from tests.support.ceph.image_claims import as_admin
from tests.support.co import NAMED, capability
from tests.support.drivers import remnants
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.support.nodes.whole_node import GuestCommands

CACHE = Path(__file__).parents[3] / ".cache" / "guest"
_EVERY = inspect_pb2.ListHandlersRequest()
IMAGE = "vol-1"
SIZE = 64 << 20


@dataclass(frozen=True)
class Storage:
    """An image in a namespace of its own, and who may use it."""

    ceph: CephCluster
    namespace: str
    user: str
    key: str

    @classmethod
    def make(cls, ceph: CephCluster) -> "Storage":
        """Make the namespace, the image and a node's user."""
        namespace = ceph.make_namespace()
        user = f"node-of-{namespace}"
        with ceph.ioctx(POOL, namespace) as ioctx:
            rbd.RBD().create(ioctx, IMAGE, SIZE, old_format=False, features=61)
            with rbd.Image(ioctx, IMAGE) as image:
                image.metadata_set("crust.volume", IMAGE)
        return cls(ceph, namespace, user, ceph.node(user, namespace))

    @property
    def image(self) -> volumes.NetworkImage:
        """The image, as a driver names it."""
        ceph = self.ceph
        return volumes.NetworkImage(
            ceph.fsid, POOL, self.namespace, IMAGE, (ceph.monitors,), self.user
        )

    def free_ended(self) -> tuple[str, ...]:
        """What the driver's controller does each second; the addresses that it has cut off."""
        with as_admin(self.ceph, self.namespace, IMAGE) as image:
            return fencing.cut_off(image)

    def answer(self, answer: csi_pb2.DeferredMount) -> None:
        """Make a driver's answer name the image."""
        mount = volumes.DeferredMount(
            self.image, answer.fs_type, capacity_bytes=self.size(), secrets={"userKey": self.key}
        )
        wire = csi.deferred_mount_to_wire(mount)
        answer.network_image.CopyFrom(wire.network_image)
        answer.capacity_bytes = wire.capacity_bytes
        answer.secrets.update(wire.secrets)

    def size(self) -> int:
        with (
            self.ceph.ioctx(POOL, self.namespace) as ioctx,
            rbd.Image(ioctx, IMAGE, read_only=True) as image,
        ):
            size: int = image.size()
            return size

    def grow(self, size: int) -> None:
        """What a controller does in an expansion."""
        with self.ceph.ioctx(POOL, self.namespace) as ioctx, rbd.Image(ioctx, IMAGE) as image:
            image.resize(size, allow_shrink=True)


@dataclass
class ImageNode(GuestCommands):
    """One node, by its name."""

    name: str
    node: FakeNode
    runtime: Client
    options: daemon.Options

    @property
    def kata_run(self) -> Path:
        return self.options.run_dir

    async def start_runtime(self) -> None:
        """Start the runtime's daemon; it serves, and is registered, at the end."""
        await self.node.enter("runtime", daemon.running(self.options))
        async with asyncio.timeout(120):
            while not (await self.node.inspect.ListHandlers(_EVERY)).handlers:
                """It registers when it serves."""

    async def sandbox(self, name: str) -> Sandbox:
        """A sandbox as the daemon has it now; it must run."""
        sandboxes: Sandboxes = self.node.value("runtime")
        return await sandboxes.get(volumes.SandboxId(name))

    async def status(self, sandbox: str) -> str:
        """What QEMU answers to query-status, in the loop that also serves the disks."""
        vm = (await self.sandbox(sandbox)).vm
        assert isinstance(vm, Machine)
        answer = await vm._control.execute("query-status")
        assert isinstance(answer, dict)
        return str(answer["status"])

    async def end_runtime(self) -> None:
        """End the daemon; virtual machines stay."""
        await self.node.stop("runtime")

    async def publish(self, *, readonly: bool = False, options: tuple[str, ...] = ()) -> str:
        """Publish the volume for a pod; its target path."""
        target = self.node.places.target(f"pod-{os.urandom(3).hex()}")
        await self.republish(target, readonly=readonly, options=options)
        return target

    async def republish(
        self, target: str, *, readonly: bool = False, options: tuple[str, ...] = ()
    ) -> None:
        """The publish of a target, again."""
        await self.node.co.publish(
            IMAGE,
            target,
            capability(mount_flags=options),
            readonly=readonly,
            volume_context=NAMED,
        )


@asynccontextmanager
async def image_node(name: str, storage: Storage) -> AsyncIterator[ImageNode]:
    """The node, while the block runs; its sandboxes are stopped at the end."""
    with trees.temporary("crust-i-") as root:
        places = Places.make(root)
        try:
            async with _running(name, storage, places) as made:
                yield made
        finally:  # after the proxy, which mounts lost guards again
            await asyncio.to_thread(remnants.remove, root)


@asynccontextmanager
async def _running(name: str, storage: Storage, places: Places) -> AsyncIterator[ImageNode]:
    guards = Targets([places.kubelet])  # the runtime looks for them
    async with FakeNode(places, targets=guards, grace_s=20) as node:
        node.driver.alter = storage.answer
        node.driver.format = volumes.GuestFormat()
        kata_run = Path(places.root) / "kata"
        options = daemon.Options(
            run_dir=kata_run,
            handlers_socket=node.places.sockets.handlers,
            name=volumes.HandlerName("kata"),
            volumes_root=node.places.volumes,
            cache=CACHE,
            node=name,
        )
        runtime = Client(str(kata_run / "control.sock"))
        made = ImageNode(name, node, runtime, options)
        await made.start_runtime()
        try:
            yield made
        finally:
            for sandbox in await runtime.list():
                await runtime.stop(sandbox["sandbox"])
