"""`crust driver --engine rbd` as a process, against a real cluster."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from crust.rpc import channel
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support import processes, trees
from tests.support.co import Co
from tests.support.faults.refusals import repeated
from tests.support.processes import Program


@dataclass(frozen=True)
class RbdDriver(Program):
    """The process, and where it serves."""

    @property
    def socket(self) -> Path:
        return self.base / self.name / "csi" / "csi.sock"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serve while the block runs; callers wait for the socket, in whose directory nothing else may lie."""
        self.socket.parent.mkdir(parents=True, mode=0o700)
        with processes.running(self):
            yield


def driver_of(
    base: Path,
    settings: str,
    *,
    mode: str = "controller",
    profile: str = "1.12",
    name: str = "driver",
) -> RbdDriver:
    """The driver of these settings, not started; its files are below `base`."""
    config, run_dir = base / f"{name}.toml", base / name
    config.write_text(settings)
    arguments = (
        *("crust", "driver", f"--config={config}", f"--mode={mode}"),
        *(f"--socket={run_dir / 'csi' / 'csi.sock'}", f"--run-dir={run_dir}"),
        *(f"--csi-profile={profile}", "--node-id=node-of-the-tests"),
    )
    return RbdDriver(base, name, arguments, base / f"{name}.log")


def settings(ceph: CephCluster, *, top: str = "", log_level: str = "debug", **rbd: Any) -> str:
    """A driver's file; `top` stands above the table of RBD."""
    table = {"monitors": ceph.monitors, "pool": POOL, **rbd}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    return f'engine = "rbd"\nlog_level = "{log_level}"\n{top}\n[rbd]\n{lines}'


def key_file(base: Path, key: str) -> str:
    """A file that has the key, and that its owner alone may read."""
    path = base / "ceph.key"
    path.write_text(f"{key}\n")
    path.chmod(0o600)
    return str(path)


def of_node(root: Path | str) -> str:
    """The settings of the node part."""
    return f'target_roots = ["{root}"]\ncheck_propagation = false\n'


@contextlib.contextmanager
def serving(
    ceph: CephCluster,
    *,
    profile: str = "1.12",
    mode: str = "controller",
    within: str = "",
    key: str = "",
    top: str = "",
    **rbd: Any,
) -> Iterator[RbdDriver]:
    """A driver with a user for the namespace, while the block runs; `rbd` has settings that differ."""
    namespace = within or ceph.make_namespace()
    user = f"controller-{namespace}"
    right = ceph.controller(user, namespace)
    with trees.temporary("crust-") as name:
        base = Path(name)
        own = {"namespace": namespace, "user": user, "key_file": key_file(base, key or right)}
        top += "" if mode == "controller" else of_node(base)
        text = settings(ceph, top=top, create_pool=True, **own | rbd)
        driver = driver_of(base, text, mode=mode, profile=profile)
        with driver.running():
            yield driver


@contextlib.asynccontextmanager
async def calling(driver: RbdDriver, **of: Any) -> AsyncIterator[Co]:
    """The CO of a driver that listens; `of` has what else `Co` takes."""
    async with channel.connect(str(driver.socket)) as connected:
        await connected.channel_ready()
        yield Co(connected, **of)


async def ready(co: Co) -> None:
    """Wait until the pool is open."""
    async with asyncio.timeout(60):
        while not await repeated(co.is_ready, *grpc.StatusCode):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
