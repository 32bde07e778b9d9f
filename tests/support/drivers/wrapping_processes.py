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
    frontend, name = base / "csi.sock", NAMES[kind]
    if as_node:
        config = base / "node.toml"
        config.write_text(node_toml(base, name, frontend, f'driver_socket = "{driver_socket}"'))
        commands = [["node", f"--config={config}", *flags]]
    else:
        shim, proxy = parts(base, name, Path(driver_socket), frontend)
        commands = [[*shim, *flags], proxy]
    with ExitStack() as stack, (base / "crust.log").open("wb") as log:
        for each in commands:
            command = [sys.executable, "-m", "crust", *each]
            started = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(started.wait)
            stack.callback(started.terminate)
        with grpc.insecure_channel(f"unix:{frontend}", channel.OPTIONS) as connected:
            grpc.channel_ready_future(connected).result(timeout=TIMEOUT_S)
        yield str(frontend)


def node_toml(base: Path, name: str, frontend: Path, shim: str) -> str:
    """The settings of proxy and shim as one process; `shim` has more of the shim's, and further tables."""
    return f"""
[proxy]
run_dir = "{base}/run"
volumes_root = "{base}/run/volumes"
target_roots = ["{base}/kubelet"]
check_propagation = false
[[proxy.drivers]]
name = "{name}"
socket = "{frontend}"
backend = "{base}/run/shim/csi.sock"
[shim]
kubelet_root = "{base}/kubelet"
check_propagation = false
{shim}
"""


def parts(
    base: Path, name: str, driver_socket: Path, frontend: Path
) -> tuple[list[str], list[str]]:
    """The arguments of the shim and of the proxy, as processes of their own."""
    run, shim, root = base / "run", base / "shim.sock", base / "kubelet"
    return [
        "shim",
        f"--socket={shim}",
        f"--driver-socket={driver_socket}",
        f"--runtime-socket={run / 'runtime.sock'}",
        f"--kubelet-root={root}",
        "--no-check-propagation",
    ], [
        "proxy",
        f"--run-dir={run}",
        f"--volumes-root={run / 'volumes'}",
        f"--driver={name},{frontend},{shim}",
        f"--target-root={root}",
        "--no-check-propagation",
    ]
