"""One containerd for all tests of a run, and a node whose daemons are pods, each in a container of its own."""

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from crust.core.settings import OWN_DRIVER
from crust.host.block import loop
from crust.host.mounts import mountinfo
from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import CephCluster
from tests.support import capabilities, containers, trees
from tests.support.co import Co, capability
from tests.support.containers import BIDIRECTIONAL, Bind, Container, Containerd
from tests.support.drivers import remnants
from tests.support.faults.refusals import until_probe
from tests.support.nodes.places import Places
from tests.support.nodes.served_node import BlockNode
from tests.support.rendered_pods import RenderedPod

ANSWER_S = 120.0
"""The deadline of a call, on a machine that does other work too."""
PODS = ("driver", "shim", "proxy")
CAPABILITY = capability(mode="SINGLE_NODE_MULTI_WRITER")


class PodPlaces(Places):
    """Of a node whose pods have the kubelet's root and the run directory in common with it."""

    @property
    def csi(self) -> str:
        return f"{self.kubelet}/plugins/{OWN_DRIVER}/csi.sock"

    @property
    def shim(self) -> str:
        return f"{self.run}/shim.sock"

    @property
    def driver(self) -> str:
        return f"{self.run}/driver.sock"

    @property
    def handler(self) -> str:
        return f"{self.run}/handler.sock"


@dataclass
class Pods(BlockNode):
    """A node whose daemons are pods, as its host sees it."""

    containerd: Containerd = field(kw_only=True)
    image: Path | None = None
    parts: tuple[str, ...] = field(default=(*PODS, "calls"), kw_only=True)

    @property
    def root(self) -> Path:
        return Path(self.places.root)

    @property
    def run(self) -> Path:
        return Path(self.places.run)

    @property
    def kubelet(self) -> Path:
        return Path(self.places.kubelet)

    @property
    def co(self) -> Co:
        return Co(self.value("calls")["csi"], ANSWER_S, waits=True)

    def start_pod(
        self, program: str, *flags: str, name: str = "", kubelet: str = BIDIRECTIONAL
    ) -> Container:
        binds = [Bind(self.run), Bind(self.root / "pool"), Bind(self.kubelet, kubelet)]
        own = {"driver": ("--node-id=node-1",), "proxy": ("--handler-grace-s=20",)}
        line = (*self.places.arguments(self.driver_name)[program], *own.get(program, ()), *flags)
        return self.containerd.run(name or program, line, binds, self.image)

    def devices(self) -> tuple[loop.LoopDevice, ...]:
        """The loop devices of the pool's images: the kernel knows their paths in a container that is gone."""
        images = {path.name for path in (self.root / "pool").rglob("*.img")}
        return loop.list_named(images.__contains__)

    def rendered(self, values: str) -> RenderedPod:
        """The pod of the chart's DaemonSet on this node."""
        paths = {"/var/lib/kubelet": self.kubelet, "/run/crust": self.run}
        paths |= {"/var/lib/crust": self.root / "pool"}
        return RenderedPod(values, "crust-node", paths, self.root)

    def part(self, name: str) -> AbstractAsyncContextManager[Any]:
        return self._pod(name) if name in PODS else super().part(name)

    @asynccontextmanager
    async def _pod(self, program: str) -> AsyncIterator[Container]:
        yield await asyncio.to_thread(self.start_pod, program)
        await asyncio.to_thread(self.containerd.remove, program)

    async def start(self, *names: str) -> None:
        """Return when a call reaches the driver through proxy and shim."""
        await super().start(*names)
        for program in ("driver", "proxy"):
            await asyncio.to_thread(self.value(program).wait_for, f"{program} serves")
        await until_probe(self.co.channel, grpc.StatusCode.OK, within_s=ANSWER_S)


@pytest.fixture(scope="session")
def containerd() -> Iterator[Containerd]:
    """One for the run: it takes a second to start."""
    capabilities.need("mount", "loop", "containerd")
    with containers.containerd() as daemon:
        yield daemon


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    """One for the run, with a manager, without which no capacity is known."""
    with ceph_cluster.running(tmp_path_factory.mktemp("ceph") / "c", with_mgr=True) as cluster:
        yield cluster


@pytest.fixture
async def pods(containerd: Containerd) -> AsyncIterator[Pods]:
    """A node without its daemons; afterwards nothing of it may be left."""
    places = PodPlaces.make(tempfile.mkdtemp(prefix="crust-"))
    node = Pods(places, containerd=containerd)
    for path in (node.run, node.root / "pool"):
        path.mkdir()
    for options in (("-t", "tmpfs", "tmpfs"), ("--make-shared",)):
        await asyncio.to_thread(subprocess.run, ["mount", *options, places.kubelet], check=True)
    try:
        yield node
        if node.is_up("calls"):
            await node.take_down()
        left = [mount.target for mount in mountinfo.below(places.kubelet)]
        assert (left, remnants.devices(places.root), node.devices()) == ([], [], ())
    finally:
        await node.stop()
        containerd.remove_all()
        remnants.remove(places.root)
        for device in node.devices():
            loop.detach(device)
        trees.remove(places.root)


@pytest.fixture
def kubelet(pods: Pods) -> Path:
    """The kubelet's root, with what every kubelet makes there."""
    (pods.kubelet / "plugins_registry").mkdir()
    (pods.kubelet / "staging").mkdir()
    return pods.kubelet
