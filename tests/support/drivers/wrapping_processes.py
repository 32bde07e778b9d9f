"""Proxy and shim, in two processes or in one, around a driver's socket, for a CO that may be any program."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc

from crust.rpc import channel
from tests.support.drivers.vendor_driver import NAMES

TIMEOUT_S = 60.0


@contextmanager
def wrapping(
    base: Path, kind: str, driver_socket: str, *, as_node: bool, flags: Sequence[str] = ()
) -> Iterator[str]:
    """The proxy's CSI socket while the block runs. `flags` are for the process that has the shim."""
    frontend = base / "csi.sock"
    ways = _node if as_node else _parts
    with ExitStack() as stack, (base / "crust.log").open("wb") as log:
        for each in ways(base, kind, driver_socket, frontend):
            command = [sys.executable, "-m", "crust", *each]
            if each[0] != "proxy":
                command.extend(flags)
            started = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(started.wait)
            stack.callback(started.terminate)
        with grpc.insecure_channel(f"unix:{frontend}", channel.OPTIONS) as connected:
            grpc.channel_ready_future(connected).result(timeout=TIMEOUT_S)
        yield str(frontend)


def _node(base: Path, kind: str, driver_socket: str, frontend: Path) -> list[list[str]]:
    config = base / "node.toml"
    config.write_text(f"""
[proxy]
run_dir = "{base}/run"
volumes_root = "{base}/run/volumes"
target_roots = ["{base}/kubelet"]
check_propagation = false
[[proxy.drivers]]
name = "{NAMES[kind]}"
socket = "{frontend}"
backend = "{base}/run/shim/csi.sock"
[shim]
driver_socket = "{driver_socket}"
kubelet_root = "{base}/kubelet"
check_propagation = false
""")
    return [["node", f"--config={config}"]]


def _parts(base: Path, kind: str, driver_socket: str, frontend: Path) -> list[list[str]]:
    run, shim, root = base / "run", base / "shim.sock", base / "kubelet"
    return [
        [
            "shim",
            f"--socket={shim}",
            f"--driver-socket={driver_socket}",
            f"--runtime-socket={run / 'runtime.sock'}",
            f"--kubelet-root={root}",
            "--no-check-propagation",
        ],
        [
            "proxy",
            f"--run-dir={run}",
            f"--volumes-root={run / 'volumes'}",
            f"--driver={NAMES[kind]},{frontend},{shim}",
            f"--target-root={root}",
            "--no-check-propagation",
        ],
    ]
