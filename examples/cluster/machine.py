"""One node of the cluster: two drivers with their shims, the proxy and the runtime, as on a Kubernetes node.

The local driver has its controller part on the node, and its sidecars call it through the proxy (node deployment).
"""

from collections.abc import Mapping
from pathlib import Path

from examples.cluster.network import Host
from examples.cluster.programs import Programs
from examples.cluster.services import LOCAL, RBD, Services
from examples.kata.demo.kubelet import Kubelet
from examples.kata.runtime.client import Client

HANDLER = "kata"


class Machine:
    """The processes of a node, and the kubelet's view of its two drivers. `close` it."""

    def __init__(self, host: Host, base: Path, services: Services) -> None:
        self.name = host.name
        self.host = host
        self.programs = Programs(host, base / host.name)
        self._base = base / host.name
        self._services = services
        self.runtime = Client(str(self._base / "kata" / "control.sock"))
        self.local = self._kubelet(LOCAL, self._csi(LOCAL))
        self.local.expands_at_controller = False
        self.rbd = self._kubelet(RBD, services.rbd_socket)

    @property
    def kubelets(self) -> tuple[Kubelet, Kubelet]:
        """Of both drivers."""
        return self.local, self.rbd

    async def start(self) -> None:
        """Start all processes; each waits for the others, so the order does not matter."""
        self.rbd.secrets = self.rbd.publish_secrets = self._services.secrets
        for name in (LOCAL, RBD):
            Path(self._csi(name)).parent.mkdir(parents=True)
        await self._start_driver("local", {"node_deployment": True, "create_pool": True})
        rbd = {"mode": "node", "engine": "rbd", "driver_name": RBD, "rbd": self._services.rbd()}
        await self._start_driver("rbd", rbd)
        for kind in ("local", "rbd"):
            await self._start_shim(kind)
        await self._start_proxy()
        await self.programs.start(
            "runtime",
            "examples.kata",
            "serve",
            f"--name={HANDLER}",
            f"--node={self.name}",
            f"--run-dir={self._base / 'kata'}",
            f"--handlers-socket={self._base / 'run' / 'handlers.sock'}",
        )

    async def wait_ready(self) -> None:
        """Until both drivers answer through the chain, and the handler is registered."""
        for kubelet in self.kubelets:
            await kubelet.wait_ready(HANDLER)

    async def close(self) -> None:
        """Stop the processes."""
        for kubelet in self.kubelets:
            await kubelet.close()
        await self.programs.stop_all()

    async def _start_driver(self, kind: str, more: Mapping[str, object]) -> None:
        config = self.programs.settings(
            f"{kind}-driver",
            {
                "socket": str(self._base / kind / "driver.sock"),
                "state_dir": str(self._base / kind / "pool"),
                "run_dir": str(self._base / kind / "run"),
                "runtime_socket": str(self._base / "run" / "runtime.sock"),
                "node_id": self.name,
                "target_roots": [str(self._base / "kubelet")],
                "check_propagation": False,
                **more,
            },
        )
        await self.programs.start(f"{kind}-driver", "crust", "driver", config)

    async def _start_shim(self, kind: str) -> None:
        await self.programs.start(
            f"{kind}-shim",
            "crust",
            "shim",
            f"--socket={self._base / kind / 'shim.sock'}",
            f"--driver-socket={self._base / kind / 'driver.sock'}",
            f"--runtime-socket={self._base / 'run' / 'runtime.sock'}",
            f"--kubelet-root={self._base / 'kubelet'}",
            "--no-check-propagation",
        )

    async def _start_proxy(self) -> None:
        await self.programs.start(
            "proxy",
            "crust",
            "proxy",
            f"--run-dir={self._base / 'run'}",
            f"--volumes-root={self._base / 'run' / 'volumes'}",
            f"--driver={LOCAL},{self._csi(LOCAL)},{self._base / 'local' / 'shim.sock'}",
            f"--driver={RBD},{self._csi(RBD)},{self._base / 'rbd' / 'shim.sock'}",
            f"--target-root={self._base / 'kubelet'}",
            "--no-check-propagation",
        )

    def _kubelet(self, driver: str, controller_socket: str) -> Kubelet:
        return Kubelet(
            self._base / "kubelet",
            self._csi(driver),
            str(self._base / "run" / "inspect.sock"),
            controller_socket,
        )

    def _csi(self, driver: str) -> str:
        return str(self._base / "kubelet" / "plugins" / driver / "csi.sock")
