"""Proxy and shim as processes around a driver, in two processes or in one, and crust's own driver in each such way.

The own driver is alone, with one pool or two, behind shim and proxy, in one process with them, or wrapped as a driver
that does not defer.
"""

import asyncio
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc

from crust.rpc import channel
from tests.support import processes
from tests.support.drivers.vendor_driver import NAMES
from tests.support.faults.refusals import until_probe
from tests.support.nodes.places import Places
from tests.support.processes import TIMEOUT_S, Program

Way = Literal["alone", "two-pools", "node-deployment", "behind-proxy", "node", "wrapped"]
NAME = "block.csi.crust.dev"
NODE_ID = "conformance-node"
POOL_BYTES = 64 << 30
MAX_VOLUMES = 24
"""Few enough that the suite tests the limit."""


FLAGS = dict.fromkeys(("driver", "shim", "proxy"), ("--no-check-propagation",))


@dataclass(frozen=True)
class FrontPlaces(Places):
    """The CO's socket is in a directory of its own; a driver that is alone serves it."""

    is_alone: bool = False

    @property
    def csi(self) -> str:
        return f"{self.root}/front/csi.sock"

    @property
    def driver(self) -> str:
        return self.csi if self.is_alone else super().driver


@dataclass(frozen=True, slots=True)
class OwnDriver:
    """What the suite needs to know of it."""

    socket: Path
    target_root: Path
    log: Path
    restart_command: str


@contextmanager
def serving(base: Path, profile: str, way: Way) -> Iterator[OwnDriver]:
    """The processes, each of which serves, while the block runs; killed at its end."""
    frontend = base / "front" / "csi.sock"
    for directory in (base / "kubelet", frontend.parent):
        directory.mkdir()
    programs = _programs(base, profile, way)
    with _reflinking_pool(base), processes.running(*programs.values()):
        asyncio.run(_probed(str(frontend)))
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


def _programs(base: Path, profile: str, way: Way) -> dict[str, Program]:
    at = FrontPlaces(str(base), is_alone=way in ("alone", "two-pools", "node-deployment"))
    if way == "node":
        return crust_programs(at, {"node": _node(at, NAME, _driver_toml(base, profile))})
    older = f"{base}/older.sock" if way == "wrapped" else ""
    lines = at.arguments(NAME, behind=older)
    lines["shim"] += (f"--csi-profile={profile}",)
    lines["driver"] += (
        f"--node-id={NODE_ID}", f"--max-volumes={MAX_VOLUMES}", f"--csi-profile={profile}",
        *["--node-deployment"] * (way == "node-deployment"),
    )  # fmt: skip
    if way == "two-pools":
        lines["driver"] += (f"--config={_with_pool(base)}",)
    if at.is_alone:
        return crust_programs(at, {"driver": lines["driver"]})
    made = crust_programs(at, lines)
    if older:
        program = ("tests.support.drivers.without_deferral", at.driver, older)
        made["older"] = Program(base, "older", program, base / "log")
    return made


FURTHER_POOL = "fast"


def _with_pool(base: Path) -> Path:
    """A file of settings with a further pool."""
    config = base / "driver.toml"
    state_dir, pool_id_file = base / "pool" / FURTHER_POOL, base / f"{FURTHER_POOL}.pool-id"
    config.write_text(
        f'[pools.{FURTHER_POOL}]\nstate_dir = "{state_dir}"\npool_id_file = "{pool_id_file}"\n'
    )
    return config


def crust_programs(at: Places, lines: Mapping[str, Sequence[str]]) -> dict[str, Program]:
    """Programs of crust by their command lines."""
    base = Path(at.root)
    return {
        name: Program(base, name, ("crust", *line, *FLAGS.get(name, ())), base / "log")
        for name, line in lines.items()
    }


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
    at, name = Places(str(base)), NAMES[kind]
    if as_node:
        lines = {"node": _node(at, name, f'driver_socket = "{driver_socket}"')}
    else:
        lines = at.arguments(name, behind=driver_socket)
        del lines["driver"]
    with processes.running(*crust_programs(at, lines).values()):
        asyncio.run(_probed(at.csi))
        yield at.csi


async def _probed(socket: str) -> None:
    """Wait until the driver behind this socket answers: a suite's first call is not repeated."""
    async with channel.connect(socket) as connected:
        await until_probe(connected, grpc.StatusCode.OK, within_s=TIMEOUT_S)


def _node(at: Places, name: str, shim: str) -> tuple[str, ...]:
    """Proxy and shim as one process, with their settings; `shim` has more of the shim's, and further tables."""
    config = Path(at.root, "node.toml")
    config.write_text(f"""
[proxy]
run_dir = "{at.run}"
volumes_root = "{at.volumes}"
target_roots = ["{at.kubelet}"]
check_propagation = false
[[proxy.drivers]]
name = "{name}"
socket = "{at.csi}"
backend = "{at.run}/shim/csi.sock"
[shim]
kubelet_root = "{at.kubelet}"
check_propagation = false
{shim}
""")
    return ("node", f"--config={config}")
