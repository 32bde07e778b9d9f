"""One node: the four processes, below one directory, each with its log."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

DRIVER = "block.csi.crust.dev"
HANDLER = "kata"
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Where everything of the node lies, all below `base`."""

    base: Path

    @property
    def kubelet(self) -> Path:
        """The CO's root."""
        return self.base / "kubelet"

    @property
    def csi_socket(self) -> str:
        """What the CO calls: the proxy's front."""
        return str(self.kubelet / "plugins" / DRIVER / "csi.sock")

    @property
    def shim_socket(self) -> str:
        """Behind the proxy."""
        return str(self.base / "shim" / "csi.sock")

    @property
    def driver_socket(self) -> str:
        """Behind the shim."""
        return str(self.base / "driver" / "csi.sock")

    @property
    def crust_run(self) -> Path:
        """The proxy's run directory."""
        return self.base / "run"

    @property
    def volumes(self) -> Path:
        """The handoff directory."""
        return self.crust_run / "volumes"

    @property
    def kata_run(self) -> Path:
        """The example runtime's run directory."""
        return self.base / "kata"

    @property
    def inspect_socket(self) -> str:
        """The operator's door."""
        return str(self.crust_run / "inspect.sock")

    @property
    def logs(self) -> Path:
        """One file per process."""
        return self.base / "logs"


class Node:
    """The node's processes. Stops them all, newest first."""

    def __init__(self, base: Path) -> None:
        self.paths = NodePaths(base)
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def start_all(self) -> None:
        """Start driver, shim, proxy and runtime; they find one another by themselves, in any order."""
        self.paths.logs.mkdir(parents=True)
        (self.paths.kubelet / "plugins" / DRIVER).mkdir(parents=True)
        for name in ("driver", "shim", "proxy", "runtime"):
            await self.start(name)

    async def start(self, name: str) -> None:
        """Start one process, its output appended to its log."""
        log = os.open(self.paths.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._running[name] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *self._arguments(name),
                stdout=log,
                stderr=log,
                process_group=0,  # a Ctrl-C is the demo's to answer: it still needs them to tidy up
            )
        finally:
            os.close(log)

    async def kill(self, name: str) -> None:
        """kill -9, and wait until it is dead."""
        process = self._running.pop(name)
        process.kill()
        await process.wait()

    async def stop_all(self) -> None:
        """Stop one after the other, newest first."""
        for name in reversed(tuple(self._running)):
            await self.stop(name)

    async def stop(self, name: str) -> None:
        """SIGTERM, and SIGKILL if it does not go; returns when it is dead."""
        process = self._running.pop(name)
        if process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def log_tail(self, name: str, lines: int = 15) -> str:
        """The end of a process's log, for the one who must find out what went wrong."""
        path = self.paths.logs / f"{name}.log"
        return "\n".join(path.read_text().splitlines()[-lines:]) if path.exists() else ""

    def _arguments(self, name: str) -> list[str]:
        at = self.paths
        root = f"--target-root={at.kubelet}"
        return {
            "driver": [
                "crust",
                "driver",
                f"--socket={at.driver_socket}",
                f"--state-dir={at.base / 'pool'}",
                f"--run-dir={at.base / 'driver-run'}",
                f"--runtime-socket={at.crust_run / 'runtime.sock'}",
                "--node-id=demo-node",
                root,
            ],
            "shim": [
                "crust",
                "shim",
                f"--socket={at.shim_socket}",
                f"--driver-socket={at.driver_socket}",
                f"--runtime-socket={at.crust_run / 'runtime.sock'}",
            ],
            "proxy": [
                "crust",
                "proxy",
                f"--run-dir={at.crust_run}",
                f"--volumes-root={at.volumes}",
                f"--driver={DRIVER},{at.csi_socket},{at.shim_socket}",
                root,
            ],
            "runtime": [
                "examples.kata",
                "serve",
                f"--name={HANDLER}",
                f"--run-dir={at.kata_run}",
                f"--handlers-socket={at.crust_run / 'handlers.sock'}",
            ],
        }[name]
