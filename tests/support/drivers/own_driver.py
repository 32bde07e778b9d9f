"""crust's driver: alone, behind shim and proxy, in one process with them, or wrapped as a driver that does not defer.

A shell command kills it: the suite's `--restart-command`, with kill -9, and a shell starts it again. The driver is
therefore no child of the test; a file has its pid. The new driver is started when the old one is dead with all its
threads: on a busy machine that takes longer than starting Python, and until then it has the pool's lock.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.support.drivers.wrapping_processes import node_toml, parts
from tests.support.faults import killing

Way = Literal["alone", "node-deployment", "behind-proxy", "node", "wrapped"]
NAME = "block.csi.crust.dev"
NODE_ID = "conformance-node"
TIMEOUT_S = 60.0
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
    root = base / "kubelet"
    root.mkdir()
    frontend = base / "front" / "csi.sock"
    frontend.parent.mkdir()
    with ExitStack() as stack:
        commands = _commands(base, root, frontend, profile, way)
        stack.enter_context(_reflinking_pool(base))
        for name, arguments in commands.items():
            start = _started(base, name, arguments)
            stack.callback(killing.kill, base / f"{name}.pid")
            subprocess.run(["/bin/sh", str(start)], check=True, timeout=TIMEOUT_S)
        restart = base / "restart.sh"
        restart.write_text(_restart(base, way))
        command = f"sh {shlex.quote(str(restart))}"
        yield OwnDriver(frontend, root, base / "log", command)


def _restart(base: Path, way: Way) -> str:
    """Kill the process that has the pool, and start it again."""
    killed = "node" if way == "node" else "driver"
    kill = shlex.join([sys.executable, killing.__file__, str(base / f"{killed}.pid")])
    return f"{kill} || exit 1\n. {base}/{killed}.sh\n"


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
        # the processes are dead with all their threads (`killing.kill`), so nothing has a file open there
        subprocess.run(["umount", str(pool)], check=True, timeout=TIMEOUT_S)


def _commands(
    base: Path, root: Path, frontend: Path, profile: str, way: Way
) -> dict[str, list[str]]:
    if way == "node":
        config = base / "node.toml"
        config.write_text(node_toml(base, NAME, frontend, _driver_toml(base, profile)))
        return {"node": ["crust", "node", f"--config={config}"]}
    behind_proxy = way not in ("alone", "node-deployment")
    driver_socket = base / "driver.sock"
    shown_socket = base / "older.sock" if way == "wrapped" else driver_socket
    alone = {
        "driver": [
            *("crust", "driver"),
            f"--socket={driver_socket if behind_proxy else frontend}",
            f"--state-dir={base / 'pool' / 'state'}",
            "--create-pool",
            f"--run-dir={base / 'driver-run'}",
            f"--node-id={NODE_ID}",
            f"--max-volumes={MAX_VOLUMES}",
            f"--csi-profile={profile}",
            f"--target-root={root}",
            "--no-check-propagation",
        ]
    }
    if way == "node-deployment":
        alone["driver"].append("--node-deployment")
    if not behind_proxy:
        return alone
    alone["driver"].append(f"--runtime-socket={base / 'run' / 'runtime.sock'}")
    shim, proxy = parts(base, NAME, shown_socket, frontend)
    older = ["tests.support.drivers.without_deferral", str(driver_socket), str(shown_socket)]
    return (
        alone
        | ({"older": older} if way == "wrapped" else {})
        | {"shim": ["crust", *shim, f"--csi-profile={profile}"], "proxy": ["crust", *proxy]}
    )


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


def _started(base: Path, name: str, arguments: list[str]) -> Path:
    """A script that starts one process and notes its pid."""
    command = shlex.join([sys.executable, "-m", *arguments])
    script = base / f"{name}.sh"
    script.write_text(f"{command} >>{base}/log 2>&1 &\necho $! >{base}/{name}.pid\n")
    return script
