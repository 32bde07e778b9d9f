"""A node whose kernel has RBD, a cluster that it reaches, and volumes of it: for tests of what the kernel does.

The node is a virtual machine (`kernel_node`), in which `crust driver --mode node` runs with the keys that its calls
bring. The controller runs on this host.
"""

import contextlib
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crust.blockdriver.ceph import claim_object
from crust.blockdriver.ceph.claim_object import Holder
from crust.blockdriver.ceph.cluster_image import ClusterImage
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2
from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph import rbd_driver
from tests.support.ceph.image_claims import as_admin
from tests.support.ceph.rbd_driver import ready
from tests.support.ceph.rbd_node import created
from tests.support.co import Co, capability
from tests.support.faults.refusals import repeated
from tests.support.nodes import kernel_node
from tests.support.nodes.kernel_node import KernelNode

MIB = 1 << 20
SIZE = 32 * MIB
KUBELET = "/var/lib/kubelet"
LOG = "/var/log/node.log"
_CONFIG, _PID = "/etc/node.toml", "/run/node.pid"
BUS = "/sys/bus/rbd/devices"


@dataclass
class Bench:
    """The cluster, a controller on this host, and a node."""

    ceph: CephCluster
    namespace: str
    user: str
    key: str
    controller: Co
    vm: KernelNode
    nodes: list[Co] = field(default_factory=list)

    async def prepare(self) -> None:
        """Configure and start the driver of a node that has booted."""
        top = rbd_driver.of_node(KUBELET)
        settings = rbd_driver.settings(self.ceph, namespace=self.namespace, top=top)
        await self.vm.write(_CONFIG, settings)
        await self.start_driver()

    async def close(self) -> None:
        """Close the connections to the driver."""
        for node in self.nodes:
            await node.channel.close()
        self.nodes.clear()

    async def start_driver(self) -> None:
        """Start the node's driver, and wait until it serves."""
        socket = kernel_node.SOCKET
        await self.vm.shell(
            f"mkdir -p {Path(socket).parent}; chmod 700 {Path(socket).parent}\n"
            f"export PYTHONDONTWRITEBYTECODE=1\n"
            f"{sys.executable} -m crust driver --config={_CONFIG} --mode=node --socket={socket} --run-dir=/run/node"
            f" --node-id=node-a >>{LOG} 2>&1 & echo $! >{_PID}"
        )
        self.nodes.append(Co(self.vm.channel(), metadata=extensions.METADATA))
        await ready(self.node)

    async def kill_driver(self) -> None:
        """SIGKILL."""
        await self.vm.shell(f"kill -9 $(cat {_PID}); rm {_PID}")
        await self.close()

    @property
    def node(self) -> Co:
        """The calls of the node's driver."""
        return self.nodes[-1]

    @property
    def secrets(self) -> dict[str, str]:
        return {"userID": self.user, "userKey": self.key}

    async def delete(self, volume_id: str) -> None:
        """Delete a volume; a controller that flattens its clone has it open meanwhile."""
        await repeated(lambda: self.controller.delete(volume_id), while_named="StillAttached")

    async def volume(
        self,
        mode: str = "SINGLE_NODE_WRITER",
        *,
        source: str = "",
        fs_type: str = "",
        size: int = SIZE,
    ) -> "Volume":
        """A new raw volume, or one with a filesystem."""
        used = capability(fs_type, block=not fs_type, mode=mode)
        made = await created(self.controller, uuid.uuid4().hex, used, size=size, volume=source)
        return Volume(self, made.volume_id, dict(made.volume_context), used, size)

    async def written(self, text: str = "kept", mode: str = "SINGLE_NODE_WRITER") -> "Volume":
        """A new raw volume, staged and published, with a text at its start."""
        volume = await self.volume(mode)
        await volume.use()
        await volume.write(text)
        return volume

    @contextlib.contextmanager
    def ioctx(self) -> Iterator[Any]:
        with self.ceph.ioctx(POOL, self.namespace) as ioctx:
            yield ioctx

    def claimed(self, image: str) -> AbstractContextManager[ClusterImage]:
        return as_admin(self.ceph, self.namespace, image)


@dataclass
class Volume:
    """A raw volume, and where it is used on the node."""

    bench: Bench
    id: str
    context: dict[str, str]
    capability: csi_pb2.VolumeCapability
    size: int = SIZE

    @property
    def staging(self) -> str:
        return f"{KUBELET}/staging-{self.id}"

    @property
    def target(self) -> str:
        return f"{KUBELET}/target-{self.id}"

    async def stage(self) -> None:
        await self.bench.vm.run("mkdir", "-p", self.staging)
        await self.bench.node.stage(
            self.id,
            self.staging,
            self.capability,
            volume_context=self.context,
            secrets=self.bench.secrets,
        )

    async def use(self, *, readonly: bool = False) -> None:
        """Stage and publish."""
        await self.stage()
        await self.publish(readonly=readonly)

    async def end_use(self) -> None:
        """Unpublish and unstage."""
        await self.unpublish()
        await self.unstage()

    async def stage_when_free(self) -> None:
        """Stage, after the controller has cut off the client that the node had before its boot."""
        await repeated(self.stage, while_named="ImageNotCutOff")

    async def publish(self, *, readonly: bool = False, deferred: bool = False) -> Any:
        return await self.bench.node.publish(
            self.id,
            self.target,
            self.capability,
            defer=deferred,
            staging=self.staging,
            volume_context=self.context,
            readonly=readonly,
            secrets=self.bench.secrets,
        )

    async def unpublish(self, timeout_s: float = 60) -> None:
        await self.bench.node.unpublish(self.id, self.target, timeout_s=timeout_s)

    async def unstage(self) -> None:
        await self.bench.node.unstage(self.id, self.staging)

    async def expand(self) -> None:
        """Grown to twice its size, by both parts."""
        size, use = 2 * self.size, self.capability
        await self.bench.controller.grow(self.id, size, volume_capability=use)
        await self.bench.node.expand(
            self.id, self.target, size, volume_capability=use, secrets=self.bench.secrets
        )

    async def leave(self) -> None:
        """Unpublish, unstage, delete; nothing is left in the pool or the kernel."""
        await self.end_use()
        assert await self.mapped() == []
        await self.bench.delete(self.id)
        assert self.holders() == ()

    async def mapped(self) -> list[str]:
        """The addresses of the kernel's clients that have the image."""
        addresses = await self.bench.vm.shell(
            f"cd {BUS}; for device in *; do [ -e $device ] || continue;"
            f' [ "$(cat $device/name)" != {self.id} ] || cat $device/client_addr; done'
        )
        return addresses.split()

    def holders(self) -> tuple[Holder, ...]:
        with self.bench.ioctx() as ioctx:
            return claim_object.read(ioctx, self.id).claims.holders

    async def write(self, text: str) -> None:
        """Write at the start of the device, durably, as a pod does."""
        await self.bench.vm.run(
            "/bin/sh", "-c", f"dd of={self.target} bs=512 conv=sync,notrunc,fsync oflag=direct 2>&1",
            text=text,
        )  # fmt: skip

    async def read(self) -> str:
        """What is at the start of the device, from the cluster."""
        return await self.bench.vm.shell(
            f"dd if={self.target} bs=512 count=1 iflag=direct 2>/dev/null | tr -d '\\0'"
        )


@contextlib.asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Bench]:
    """A cluster of three monitors that the node reaches, with a manager, without which no capacity is known."""
    async with contextlib.AsyncExitStack() as held:
        network = held.enter_context(kernel_node.network())
        ceph = held.enter_context(
            ceph_cluster.running(directory / "c", with_mgr=True, host=network.host, monitors=3)
        )
        namespace = ceph.make_namespace()
        driver = held.enter_context(rbd_driver.serving(ceph, within=namespace))
        vm = await held.enter_async_context(kernel_node.running(directory, network))
        controller = await held.enter_async_context(rbd_driver.calling(driver))
        user = f"node-of-{namespace}"
        key = ceph.node(user, namespace)
        made = Bench(ceph, namespace, user, key, controller, vm)
        await made.prepare()
        await ready(controller)
        yield made
        await made.close()


_POOL_PROGRAM = """\
import sys
from crust.core import volumes
from crust.blockdriver.engines.pool_access import Access
from crust.blockdriver.engines.rbd import Namespace
from crust.blockdriver.engines.rbd.node import access, volume_users
from crust.blockdriver.ceph import connection, user as ceph_user
method, monitors, user, key, pool, namespace, volume = sys.argv[1:]
place = Namespace.of(connection.Connection(ceph_user.CephUser(monitors, user, key)), pool, namespace)
here = access.RbdAccess(volume_users.Users(place), "/run/of-a-pool", "node-a")
arguments = [Access(on_host=True)] if method == "attach" else []
getattr(here, method)(volumes.VolumeId(volume), *arguments)
print(" ".join(here.attached_here()))
"""


async def in_a_process(bench: Bench, method: str, pool: str, user: str, volume_id: str) -> str:
    """Attach or detach a volume of another pool on the node, in a process of its own; what is attached then."""
    await bench.vm.write("/run/of-a-pool.py", _POOL_PROGRAM)
    key = bench.ceph.keys[f"client.{user}"]
    arguments = (method, bench.ceph.monitors, user, key, pool, "", volume_id)
    return (await bench.vm.run(sys.executable, "/run/of-a-pool.py", *arguments)).strip()


_KILLED = """\
import os, signal, sys
from crust.core import volumes
from crust.blockdriver.engines.pool_access import Access
from crust.blockdriver.engines.rbd import Namespace
from crust.blockdriver.engines.rbd.node import access, host_devices, volume_users
from crust.blockdriver.ceph import claims, connection, user as ceph_user
from crust.blockdriver.host import krbd
step, monitors, user, key, pool, namespace, volume = sys.argv[1:]
place = Namespace.of(connection.Connection(ceph_user.CephUser(monitors, user, key)), pool, namespace)
here = access.RbdAccess(volume_users.Users(place), "/run/node", "node-a")
if step == "give_back":
    here.attach(volumes.VolumeId(volume), Access(on_host=True))
where = {"map": krbd.KernelRbd, "device": krbd.KernelRbd}.get(step, claims.HostClaim)
setattr(where, step, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
if step == "give_back":
    here.detach(volumes.VolumeId(volume))
here.attach(volumes.VolumeId(volume), Access(on_host=True))
"""


async def killed_before(step: str, volume: Volume) -> None:
    """Attach the volume on the node, or give it back, in a process that is killed before a step of that."""
    bench = volume.bench
    await bench.vm.write("/run/killed.py", _KILLED)
    arguments = (step, bench.ceph.monitors, bench.user, bench.key, POOL, bench.namespace, volume.id)
    code, output = await bench.vm.ask(sys.executable, "/run/killed.py", *arguments)
    assert code == -9, output
