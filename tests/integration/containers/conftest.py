"""One containerd for all tests of a run, and a node whose daemons are pods, each in a container of its own."""

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from crust.core import volumes
from crust.handoff import store
from crust.host.mounts import mountinfo
from crust.rpc import channel
from tests.support import capabilities, containers
from tests.support.co import Co, capability
from tests.support.containers import BIDIRECTIONAL, Bind, Container, Containerd
from tests.support.drivers import remnants
from tests.support.faults.refusals import until_probe
from tests.support.nodes.node import NAMED, Sockets
from tests.support.runtimes import fake_handler

ANSWER_S = 120.0
"""The deadline of a call, on a machine that does other work too."""
DRIVER = "block.csi.crust.dev"
CAPABILITY = capability(mode="SINGLE_NODE_MULTI_WRITER")


@dataclass
class Pods:
    """A node, as its host sees it."""

    containerd: Containerd
    root: Path
    image: Path | None = None
    running: dict[str, Container] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def kubelet(self) -> Path:
        return self.root / "kubelet"

    @property
    def csi(self) -> str:
        return str(self.kubelet / "plugins" / DRIVER / "csi.sock")

    @property
    def sockets(self) -> Sockets:
        return Sockets.below(str(self.run))

    def start(
        self, program: str, *flags: str, name: str = "", kubelet: str = BIDIRECTIONAL
    ) -> Container:
        binds = [Bind(self.run), Bind(self.root / "pool"), Bind(self.kubelet, kubelet)]
        started = self.containerd.run(
            name or program, [*self._arguments(program), *flags], binds, self.image
        )
        self.running[name or program] = started
        return started

    async def start_all(self) -> None:
        """Driver, shim and proxy; returns when a call reaches the driver through both."""
        for program in ("driver", "shim", "proxy"):
            await asyncio.to_thread(self.start, program)
        for program in ("driver", "proxy"):
            await asyncio.to_thread(self.running[program].wait_for, f"{program} serves")
        async with channel.connect(self.csi) as connected:
            await until_probe(connected, grpc.StatusCode.OK, within_s=ANSWER_S)

    def target(self, pod: str) -> str:
        """A target path, whose parent is the kubelet's to make."""
        (self.kubelet / "pods" / pod).mkdir(parents=True)
        return str(self.kubelet / "pods" / pod / "mount")

    def entry(self, target: str) -> store.Entry | None:
        return store.Store(f"{self.run}/volumes").read(volumes.TargetPath(target))

    def handler(self) -> Any:
        """A runtime handler on the host, whose socket the proxy's container can reach."""
        return fake_handler.running(
            fake_handler.FakeHandler(),
            proxy_socket=self.sockets.handlers,
            endpoint=f"{self.run}/handler.sock",
        )

    def _arguments(self, program: str) -> list[str]:
        run, roots = self.run, f"--target-root={self.kubelet}"
        shim, driver = f"{run}/shim.sock", f"{run}/driver.sock"
        runtime = f"--runtime-socket={run}/runtime.sock"
        kubelet_root = f"--kubelet-root={self.kubelet}"
        return {
            "driver": [
                "driver", f"--socket={driver}", f"--state-dir={self.root}/pool/state",
                "--create-pool", f"--run-dir={run}/driver", "--node-id=node-1", runtime, roots,
            ],
            "shim": ["shim", f"--socket={shim}", f"--driver-socket={driver}", runtime, kubelet_root],
            "proxy": [
                "proxy", f"--run-dir={run}", f"--volumes-root={run}/volumes",
                f"--driver={DRIVER},{self.csi},{shim}", "--handler-grace-s=20", roots,
            ],
        }[program]  # fmt: skip


class Kubelet:
    """Calls the CSI socket of the node."""

    def __init__(self, pods: Pods, connected: grpc.aio.Channel) -> None:
        self.pods = pods
        self.co = Co(connected, ANSWER_S, waits=True)

    def staging(self, volume_id: str) -> str:
        path = self.pods.kubelet / "staging" / volume_id
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    async def volume(self, name: str) -> str:
        """Create and stage; returns the volume's id."""
        volume_id = (await self.co.create(name, CAPABILITY)).volume_id
        await self.co.stage(volume_id, self.staging(volume_id), CAPABILITY)
        return volume_id

    async def publish(self, volume_id: str, target: str, *, defer: bool) -> None:
        await self.co.publish(
            volume_id,
            target,
            CAPABILITY,
            defer=defer,
            staging=self.staging(volume_id),
            volume_context=NAMED,
        )

    async def delete(self, volume_id: str) -> None:
        await self.co.unstage(volume_id, self.staging(volume_id))
        await self.co.delete(volume_id)


@asynccontextmanager
async def kubelet_of(pods: Pods) -> AsyncIterator[Kubelet]:
    async with channel.connect(pods.csi) as connected:
        yield Kubelet(pods, connected)


@pytest.fixture(scope="session")
def containerd() -> Iterator[Containerd]:
    """One for the run: it takes a second to start."""
    capabilities.need("mount", "loop", "containerd")
    with containers.containerd() as daemon:
        yield daemon


@pytest.fixture
def pods(containerd: Containerd) -> Iterator[Pods]:
    """A node without its daemons; afterwards nothing of it may be left."""
    root = Path(tempfile.mkdtemp(prefix="crust-"))
    node = Pods(containerd, root)
    for path in (node.run, node.kubelet, root / "pool"):
        path.mkdir()
    mount = ("mount", "-t", "tmpfs", "tmpfs", str(node.kubelet))
    subprocess.run(mount, check=True)
    subprocess.run(["mount", "--make-shared", str(node.kubelet)], check=True)
    try:
        yield node
        left = [each.target for each in mountinfo.below(str(node.kubelet))]
        assert (left, remnants.devices(root)) == ([], [])
    finally:
        containerd.remove_all()
        remnants.remove(root)
        shutil.rmtree(root)
