"""Proxy and shim as processes around a driver, in two processes or in one, and crust's own driver in each such way.

The own driver is alone, behind shim and proxy, in one process with them, or wrapped as a driver that does not defer.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc

from crust.rpc import channel
from tests.support import processes
from tests.support.drivers.vendor_driver import NAMES
from tests.support.processes import TIMEOUT_S, Program

Way = Literal["alone", "node-deployment", "behind-proxy", "node", "wrapped"]
NAME = "block.csi.crust.dev"
NODE_ID = "conformance-node"
POOL_BYTES = 64 << 30
MAX_VOLUMES = 24
"""Few enough that the suite tests the limit."""


@dataclass(frozen=True, slots=True)
class OwnDriver:
    """What the suite needs to know of it."""

    socket: Path
    target_root: Path
    log: Path
    restart_command: str


@contextmanager
def serving(base: Path, profile: str, way: Way) -> Iterator[OwnDriver]:
    """The processes, while the block runs; killed at its end."""
    frontend = base / "front" / "csi.sock"
    for directory in (base / "kubelet", frontend.parent):
        directory.mkdir()
    programs = _programs(base, frontend, profile, way)
    with _reflinking_pool(base), processes.running(*programs.values()):
        has_pool = programs["node" if way == "node" else "driver"]
        yield OwnDriver(frontend, base / "kubelet", base / "log", has_pool.restart_command)


@contextmanager
def _reflinking_pool(base: Path) -> Iterator[None]:
    """An xfs of our own, so that the pool's features do not depend on the machine's filesystem."""
    image, pool = base / "pool.img", base / "pool"
    with image.open("wb") as file:
        file.truncate(POOL_BYTES)
    pool.mkdir()
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True, timeout=TIMEOUT_S)
    subprocess.run(["mount", "-o", "loop", str(image), str(pool)], check=True, timeout=TIMEOUT_S)
    try:
        yield
    finally:
        # the processes are dead with all their threads (`processes.kill`), so nothing has a file open there
        subprocess.run(["umount", str(pool)], check=True, timeout=TIMEOUT_S)


def _programs(base: Path, frontend: Path, profile: str, way: Way) -> dict[str, Program]:
    if way == "node":
        config = _node_config(base, NAME, frontend, _driver_toml(base, profile))
        return _made(base, {"node": ("crust", "node", f"--config={config}")})
    behind_proxy = way not in ("alone", "node-deployment")
    driver_socket = base / "driver.sock"
    shown_socket = base / "older.sock" if way == "wrapped" else driver_socket
    driver: tuple[str, ...] = (
        *("crust", "driver"),
        f"--socket={driver_socket if behind_proxy else frontend}",
        f"--state-dir={base / 'pool' / 'state'}",
        "--create-pool",
        f"--run-dir={base / 'driver-run'}",
        f"--node-id={NODE_ID}",
        f"--max-volumes={MAX_VOLUMES}",
        f"--csi-profile={profile}",
        f"--target-root={base / 'kubelet'}",
        "--no-check-propagation",
    )
    if way == "node-deployment":
        driver += ("--node-deployment",)
    if not behind_proxy:
        return _made(base, {"driver": driver})
    commands = {"driver": (*driver, f"--runtime-socket={base / 'run' / 'runtime.sock'}")}
    if way == "wrapped":
        older = "tests.support.drivers.without_deferral"
        commands["older"] = (older, str(driver_socket), str(shown_socket))
    flags = (f"--csi-profile={profile}",)
    return _made(base, commands | _parts(base, NAME, str(shown_socket), frontend, flags))


def _made(base: Path, commands: dict[str, tuple[str, ...]]) -> dict[str, Program]:
    return {name: Program(base, name, each, base / "log") for name, each in commands.items()}


def _driver_toml(base: Path, profile: str) -> str:
    return f"""csi_profile = "{profile}"
[driver]
state_dir = "{base}/pool/state"
create_pool = true
node_id = "{NODE_ID}"
max_volumes = {MAX_VOLUMES}
csi_profile = "{profile}"
target_roots = ["{base}/kubelet"]
check_propagation = false
"""


@contextmanager
def wrapping(base: Path, kind: str, driver_socket: str, *, as_node: bool) -> Iterator[str]:
    """The CSI socket of a proxy, with a shim that wraps the vendor's driver, while the block runs."""
    frontend, name = base / "csi.sock", NAMES[kind]
    if as_node:
        config = _node_config(base, name, frontend, f'driver_socket = "{driver_socket}"')
        commands: dict[str, tuple[str, ...]] = {"node": ("crust", "node", f"--config={config}")}
    else:
        commands = _parts(base, name, driver_socket, frontend)
    with processes.running(*_made(base, commands).values()):
        with grpc.insecure_channel(f"unix:{frontend}", channel.OPTIONS) as connected:
            grpc.channel_ready_future(connected).result(timeout=TIMEOUT_S)
        yield str(frontend)


def _node_config(base: Path, name: str, frontend: Path, shim: str) -> Path:
    """The settings of proxy and shim as one process; `shim` has more of the shim's, and further tables."""
    config = base / "node.toml"
    config.write_text(f"""
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
""")
    return config


def _parts(
    base: Path, name: str, driver_socket: str, frontend: Path, flags: Sequence[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Shim and proxy as processes of their own; `flags` are the shim's."""
    run, shim, root = base / "run", base / "shim.sock", base / "kubelet"
    return {
        "shim": (
            *("crust", "shim"),
            f"--socket={shim}",
            f"--driver-socket={driver_socket}",
            f"--runtime-socket={run / 'runtime.sock'}",
            f"--kubelet-root={root}",
            "--no-check-propagation",
            *flags,
        ),
        "proxy": (
            *("crust", "proxy"),
            f"--run-dir={run}",
            f"--volumes-root={run / 'volumes'}",
            f"--driver={name},{frontend},{shim}",
            f"--target-root={root}",
            "--no-check-propagation",
        ),
    }
