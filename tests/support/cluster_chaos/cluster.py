"""The processes under test: etcd, Ceph, two controllers of each driver, a local driver on each node."""

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from examples.cluster.ceph_cluster import POOL, CephCluster
from examples.cluster.etcd import Etcd
from examples.cluster.network import Host, Network
from examples.cluster.programs import Programs
from examples.cluster.services import NAMESPACE, RBD
from tests.support.cluster_chaos import found

NODES = ("a", "b", "c")
CONTROLLERS = ("one", "two")
WRITER = "writer"
"""The user in Ceph of the processes that write images, as a node's virtual machines do."""


class Driver(Programs):
    """One driver's process on a host, that can also be stopped for a while."""

    def send(self, name: str, number: int) -> None:
        """Send a signal to a process; one that has ended gets none."""
        signalled(self._running[name].running, number)

    async def kill(self, name: str) -> None:
        """SIGKILL; one that has ended is a success."""
        with contextlib.suppress(ProcessLookupError):
            await super().kill(name)

    def ended(self) -> list[str]:
        """The processes that have ended by themselves, as a controller does that has lost its term."""
        return [name for name, each in self._running.items() if each.running.returncode is not None]

    def go_on(self) -> None:
        """Let all go on that are stopped."""
        for name in self._running:
            self.send(name, signal.SIGCONT)


@dataclass(slots=True)
class Cluster:
    """All of it. `close` it."""

    hosts: Network
    base: Path
    etcd: Etcd
    ceph: CephCluster | None
    """Without it there are the local pools alone."""
    module: str
    """The program of the local driver's controllers: `crust`, or one that breaks a rule."""

    services: Driver = field(init=False)
    nodes: dict[str, Driver] = field(init=False)
    writer_key: str = field(default="", init=False)
    controller_key: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.services = Driver(self.hosts.services, self.base / "services")
        self.nodes = {each.name: Driver(each, self.base / each.name) for each in self.hosts.nodes}

    @property
    def engines(self) -> tuple[str, ...]:
        """What has controllers."""
        return ("local", "rbd") if self.ceph else ("local",)

    @property
    def ceph_place(self) -> found.Ceph:
        """Where the images are."""
        assert self.ceph is not None
        return found.Ceph(str(self.ceph.conf), POOL, NAMESPACE)

    def host(self, node: str) -> Host:
        """A node's host."""
        return next(each for each in self.hosts.nodes if each.name == node)

    def pool(self, node: str) -> Path:
        """The directory of a node's pool."""
        return self.base / node / "pool"

    def node_socket(self, node: str) -> str:
        """A local driver's socket, which the node's kubelet calls."""
        return str(self.base / node / "driver.sock")

    def sockets(self, engine: str) -> tuple[str, ...]:
        """The sockets of the controllers for the engine "local" or "rbd"."""
        return tuple(str(self.base / "services" / f"{engine}-{each}.sock") for each in CONTROLLERS)

    async def start(self) -> None:
        """Start everything that is not running yet; it may not serve when this returns."""
        for each in CONTROLLERS:
            await self._start_local_controller(each)
        if self.ceph is not None:
            self.ceph.make_namespace(NAMESPACE)
            self.controller_key = self.ceph.controller("controller", NAMESPACE)
            self.writer_key = self.ceph.node(WRITER, NAMESPACE)
            for each in CONTROLLERS:
                await self._start_rbd_controller(each, self.ceph)
        for name in self.nodes:
            await self._start_node(name)

    async def close(self) -> None:
        """Stop the drivers; those that are stopped go on first."""
        for programs in (*self.nodes.values(), self.services):
            programs.go_on()
            await programs.stop_all()

    async def _start_node(self, name: str) -> None:
        programs = self.nodes[name]
        config = programs.settings(
            "driver",
            {
                "mode": "node",
                "socket": self.node_socket(name),
                "state_dir": str(self.pool(name)),
                "create_pool": True,
                "run_dir": str(self.base / name / "run"),
                "node_id": name,
                "overcommit": 10.0,
                "target_roots": [str(self.base / name / "kubelet")],
                "check_propagation": False,
                "cluster": self.etcd.settings(name).model_dump(mode="json"),
            },
        )
        await programs.start("driver", "crust", "driver", config)

    async def _start_local_controller(self, name: str) -> None:
        config = self.services.settings(
            f"local-{name}",
            {
                "mode": "controller",
                "socket": str(self.base / "services" / f"local-{name}.sock"),
                "run_dir": str(self.base / "services" / f"local-{name}-run"),
                "node_id": name,
                "cluster": self.etcd.settings("controller").model_dump(mode="json"),
            },
        )
        await self.services.start(f"local-{name}", self.module, "driver", config)

    async def _start_rbd_controller(self, name: str, ceph: CephCluster) -> None:
        key = self.base / "services" / "ceph.key"
        key.parent.mkdir(parents=True, exist_ok=True)
        key.touch(mode=0o600)
        key.write_text(self.controller_key)
        config = self.services.settings(
            f"rbd-{name}",
            {
                "mode": "controller",
                "engine": "rbd",
                "driver_name": RBD,
                "socket": str(self.base / "services" / f"rbd-{name}.sock"),
                "run_dir": str(self.base / "services" / f"rbd-{name}-run"),
                "node_id": name,
                "rbd": {
                    "monitors": ceph.monitors,
                    "pool": POOL,
                    "namespace": NAMESPACE,
                    "user": "controller",
                    "key_file": str(key),
                    "create_pool": True,
                },
            },
        )
        await self.services.start(f"rbd-{name}", "crust", "driver", config)


def signalled(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal; not by the process's own method, which reaps one that has ended, and its status is lost then."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def run_in(host: Host, *arguments: str, line: str) -> asyncio.subprocess.Process:
    """Start `python -m …` on a host, and write a line to its standard input, which stays open."""
    process = await asyncio.create_subprocess_exec(
        *host.command(sys.executable, "-m", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        process_group=0,
    )
    assert process.stdin is not None
    process.stdin.write(f"{line}\n".encode())
    await process.stdin.drain()
    return process
