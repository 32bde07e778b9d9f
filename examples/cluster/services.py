"""The services of the cluster: a small Ceph, and the controller of its driver. Local volumes need none."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from examples.cluster.ceph_cluster import POOL, CephCluster
from examples.cluster.programs import Programs
from examples.kata.demo.report import require

LOCAL = "block.csi.crust.dev"
"""The driver of pools on the nodes' own disks."""
RBD = "rbd.csi.crust.dev"
"""The driver of images in the Ceph cluster."""
NAMESPACE = "crust"
NODE_USER = "crust-node"
"""Of the virtual machines; it may read and write images, and blocklist nobody."""


@dataclass(slots=True)
class Services:
    """The peers of the nodes and the sidecars."""

    ceph: CephCluster
    programs: Programs
    node_key: str = ""
    _controller_key: str = ""

    @property
    def rbd_socket(self) -> str:
        """The CSI socket of the Ceph driver's controller."""
        return str(self.programs.base / "rbd.sock")

    async def start(self) -> None:
        """Make the users of the Ceph cluster, and start the controller."""
        self.ceph.make_namespace(NAMESPACE)
        self.programs.base.mkdir(parents=True, exist_ok=True)
        self._controller_key = self.ceph.controller("controller", NAMESPACE)
        self.node_key = self.ceph.node(NODE_USER, NAMESPACE)
        await self._start_rbd()

    async def fence(self, node: str) -> None:
        """Do an operator's work when a node is gone: `crust ceph fence`, the key by standard input."""
        command = (
            *(sys.executable, "-m", "crust", "ceph", "fence", node, "--even-if-connected"),
            *(f"--monitors={self.ceph.monitors}", "--user=controller"),
            *(f"--pool={POOL}", f"--namespace={NAMESPACE}"),
        )
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate(f"{self._controller_key}\n".encode())
        require(f"node {node} is fenced: {output.decode()}", process.returncode == 0)

    def key_file(self, directory: Path, key: str) -> str:
        """Write a key for a driver; returns where."""
        path = directory / "ceph.key"
        path.touch(mode=0o600)
        path.write_text(key)
        return str(path)

    async def _start_rbd(self) -> None:
        config = self.programs.settings(
            "rbd-controller",
            {
                "mode": "controller",
                "engine": "rbd",
                "driver_name": RBD,
                "socket": self.rbd_socket,
                "run_dir": str(self.programs.base / "rbd-run"),
                "node_id": "controller",
                "rbd": {
                    **self.rbd(),
                    "user": "controller",
                    "key_file": self.key_file(self.programs.base, self._controller_key),
                    "create_pool": True,
                },
            },
        )
        await self.programs.start("rbd-controller", "crust", "driver", config)

    def rbd(self) -> dict[str, object]:
        """Where the images are. A node has no user of its own: the key comes with each volume."""
        return {"monitors": self.ceph.monitors, "pool": POOL, "namespace": NAMESPACE}

    @property
    def secrets(self) -> dict[str, str]:
        """The node-stage secrets of the Ceph driver's volumes."""
        return {"userID": NODE_USER, "userKey": self.node_key}
