"""One node: driver, shim, proxy and runtime as processes, all below one directory, each with its own log.

With `Vendor` the driver is another one than crust's, which knows nothing of deferral: the shim wraps it, and a second
shim runs beside its controller.
"""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Self

DRIVER = "block.csi.crust.dev"
HANDLER = "kata"
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Vendor:
    """A driver that is not crust's: its name, and the module that runs it.

    The module takes --socket, --state-dir and --node-id.
    """

    name: str
    module: str


@dataclass(frozen=True, slots=True)
class NodePaths:
    """The paths of the node, all below `base`."""

    base: Path
    driver: str = DRIVER

    @property
    def kubelet(self) -> Path:
        """The kubelet's root directory."""
        return self.base / "kubelet"

    @property
    def csi_socket(self) -> str:
        """The proxy's CSI socket, which the kubelet calls."""
        return str(self.kubelet / "plugins" / self.driver / "csi.sock")

    @property
    def controller_socket(self) -> str:
        """The socket that the CSI sidecars call: with a vendor's driver the controller's shim, else the proxy."""
        return self.csi_socket if self.driver == DRIVER else str(self.base / "ctl" / "csi.sock")

    @property
    def shim_socket(self) -> str:
        """The shim's CSI socket, which the proxy calls."""
        return str(self.base / "shim" / "csi.sock")

    @property
    def driver_socket(self) -> str:
        """The driver's CSI socket, which the shim calls."""
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
        """The proxy's Inspect socket, for operators."""
        return str(self.crust_run / "inspect.sock")

    @property
    def logs(self) -> Path:
        """One log file per process."""
        return self.base / "logs"


@dataclass(frozen=True, slots=True)
class Process:
    """One daemon of the node."""

    running: asyncio.subprocess.Process

    @classmethod
    async def start(cls, log: Path, *arguments: str) -> Self:
        """Start `python -m arguments…` and append its output to `log`; it may not serve yet when this returns."""
        return await cls.run(log, sys.executable, "-m", *arguments)

    @classmethod
    async def run(cls, log: Path, *command: str) -> Self:
        """Start a command likewise."""
        with log.open("ab") as output:
            running = await asyncio.create_subprocess_exec(
                *command,
                stdout=output,
                stderr=output,
                # Ctrl-C must reach the caller alone, which still needs the daemons to clean up.
                process_group=0,
            )
        return cls(running)

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after STOP_TIMEOUT_S; returns when the process has ended."""
        if self.running.returncode is not None:
            return
        self.running.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.running.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended."""
        self.running.kill()
        await self.running.wait()


class Node:
    """The node's processes, by name: driver, shim, proxy, runtime."""

    def __init__(self, base: Path, vendor: Vendor | None = None) -> None:
        self.paths = NodePaths(base, vendor.name if vendor else DRIVER)
        self._vendor = vendor
        self.runtime_options: tuple[str, ...] = ()
        """More options of the runtime, from its next start on."""
        self._running: dict[str, Process] = {}

    async def start_all(self) -> None:
        """Start driver, shims, proxy and runtime; each waits for the others, so the order does not matter."""
        self.paths.logs.mkdir(parents=True)
        Path(self.paths.csi_socket).parent.mkdir(parents=True)
        controller = ("controller",) if self._vendor else ()
        for name in ("driver", *controller, "shim", "proxy", "runtime"):
            await self.start(name)

    async def start(self, name: str) -> None:
        """Start one process, its output appended to its log."""
        log = self.paths.logs / f"{name}.log"
        self._running[name] = await Process.start(log, *self._arguments(name))

    async def wait_ready(self, ready: Coroutine[None, None, None]) -> None:
        """Wait for `ready`; raises ChildProcessError as soon as a process has ended, for wrong settings say."""
        ends = (self._ended(*process) for process in self._running.items())
        tasks = [asyncio.ensure_future(waiting) for waiting in (ready, *ends)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ended(self, name: str, process: Process) -> None:
        code = await process.running.wait()
        raise ChildProcessError(f"{name} ended with exit code {code} before the node was ready")

    async def kill(self, name: str) -> None:
        """Send SIGKILL and wait until the process has ended."""
        await self._running.pop(name).kill()

    async def stop_all(self) -> None:
        """Stop the processes, newest first."""
        for name in reversed(tuple(self._running)):
            await self.stop(name)

    async def stop(self, name: str) -> None:
        """Stop one process."""
        await self._running.pop(name).stop()

    def log_tail(self, name: str, lines: int = 15) -> str:
        """The last lines of a process's log."""
        path = self.paths.logs / f"{name}.log"
        return "\n".join(path.read_text().splitlines()[-lines:]) if path.exists() else ""

    def _arguments(self, name: str) -> list[str]:
        at = self.paths
        # kubelet and runtime of the demo live in this mount namespace, which `make` keeps private
        root = (f"--target-root={at.kubelet}", "--no-check-propagation")
        if self._vendor and name == "driver":
            return self._vendors_driver(self._vendor)
        return {
            "controller": [
                "crust",
                "shim",
                "--controller",
                "--no-check-detach",  # nobody detaches by force here
                f"--socket={at.controller_socket}",
                f"--driver-socket={at.driver_socket}",
            ],
            "driver": [
                "crust",
                "driver",
                f"--socket={at.driver_socket}",
                f"--state-dir={at.base / 'pool'}",
                "--create-pool",
                f"--run-dir={at.base / 'driver-run'}",
                f"--runtime-socket={at.crust_run / 'runtime.sock'}",
                "--node-id=demo-node",
                *root,
            ],
            "shim": [
                "crust",
                "shim",
                f"--socket={at.shim_socket}",
                f"--driver-socket={at.driver_socket}",
                f"--runtime-socket={at.crust_run / 'runtime.sock'}",
                f"--kubelet-root={at.kubelet}",
                "--no-check-propagation",
            ],
            "proxy": [
                "crust",
                "proxy",
                f"--run-dir={at.crust_run}",
                f"--volumes-root={at.volumes}",
                f"--driver={at.driver},{at.csi_socket},{at.shim_socket}",
                *root,
            ],
            "runtime": [
                "examples.kata",
                "serve",
                f"--name={HANDLER}",
                f"--run-dir={at.kata_run}",
                f"--handlers-socket={at.crust_run / 'handlers.sock'}",
                *self.runtime_options,
            ],
        }[name]

    def _vendors_driver(self, vendor: Vendor) -> list[str]:
        at = self.paths
        Path(at.driver_socket).parent.mkdir(exist_ok=True)
        return [
            vendor.module,
            f"--socket={at.driver_socket}",
            f"--state-dir={at.base / 'pool'}",
            "--node-id=demo-node",
        ]
