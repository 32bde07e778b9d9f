"""A node to measure: driver, shim and proxy as processes, and a runtime handler in this process.

The proxy serves two CSI sockets: one in front of shim and driver, as on a real node, and one directly in front of the
driver, which shows the cost of one hop. The run directories are on a tmpfs, as /run is on every node; the pool is on
the disk. On exit the processes are stopped, newest first, and every directory is removed.
"""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from crust.core import volumes
from crust.host.block import loop
from crust.host.mounts import mount_api, mountinfo
from crust.rpc import channel
from crust.runtime_handler import registration, service
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.kata.demo.kubelet import Kubelet
from examples.kata.demo.node import DRIVER, HANDLER, NodePaths, Process

ONE_HOP = "onehop.csi.crust.dev"
START_TIMEOUT_S = 30.0


@contextlib.contextmanager
def directories() -> Iterator[NodePaths]:
    """The node's directories, with a tmpfs for the run directories; all are removed on exit."""
    base = Path(tempfile.mkdtemp(prefix="crust-bench-"))
    paths = NodePaths(base)
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, base)
        undo.callback(clean_up, base, base)
        for run in (paths.crust_run, base / "driver-run"):
            run.mkdir()
            _mount_tmpfs(run)
        paths.logs.mkdir()
        yield paths


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """An empty run directory, on a tmpfs; it is removed on exit, with the mounts below it."""
    with tempfile.TemporaryDirectory(prefix="crust-") as base, contextlib.ExitStack() as undo:
        undo.callback(clean_up, Path(base), Path(base))
        run = Path(base, "run")
        run.mkdir()
        _mount_tmpfs(run)
        yield run


async def start(
    paths: NodePaths, name: str, *, volumes_root: Path | None = None, config: Path | None = None
) -> Process:
    """Start `python -m crust name …`, the driver with its own `config`; it may not serve yet when this returns."""
    if name == "node":
        (paths.base / "node.toml").write_text(_node_toml(paths))
        own = f"--config={paths.base / 'node.toml'}"
        return await Process.start(paths.logs / "node.log", "crust", "node", own)
    arguments = _arguments(paths, volumes_root or paths.volumes)[name]
    if name == "driver" and config is not None:
        arguments = [
            f"--config={config}",
            *(argument for argument in arguments if "pool" not in argument),
        ]
    return await Process.start(paths.logs / f"{name}.log", "crust", name, *arguments)


@contextlib.asynccontextmanager
async def driver(paths: NodePaths) -> AsyncIterator[Kubelet]:
    """The driver alone; yields a kubelet that calls its socket."""
    async with contextlib.AsyncExitStack() as stack:
        process = await start(paths, "driver")
        stack.push_async_callback(process.stop)
        await wait_until_serving(paths.driver_socket)
        yield await stack.enter_async_context(caller(paths, paths.driver_socket))


@contextlib.asynccontextmanager
async def serving(paths: NodePaths, *, config: Path | None = None) -> AsyncIterator[Kubelet]:
    """Driver, shim, proxy and a registered handler; yields a kubelet that calls the proxy's socket."""
    async with serving_with_pids(paths, config=config) as (co, _):
        yield co


@contextlib.asynccontextmanager
async def serving_with_pids(
    paths: NodePaths, *, config: Path | None = None
) -> AsyncIterator[tuple[Kubelet, tuple[int, ...]]]:
    """The same, and the processes."""
    async with contextlib.AsyncExitStack() as stack:
        pids = []
        for name in ("driver", "shim", "proxy"):
            process = await start(paths, name, config=config)
            stack.push_async_callback(process.stop)
            pids.append(process.running.pid)
        await stack.enter_async_context(registered(paths))
        # In this order, because the proxy does not wait for a shim, nor the shim for a driver.
        for socket in (paths.driver_socket, paths.shim_socket):
            await wait_until_serving(socket)
        co = await stack.enter_async_context(caller(paths, paths.csi_socket))
        await co.wait_ready(HANDLER)
        yield co, tuple(pids)


@contextlib.asynccontextmanager
async def registered(paths: NodePaths) -> AsyncIterator[registration.Registration]:
    """A handler that registers again whenever the proxy restarts."""
    request = registration.RegisterRequest(
        name=volumes.HandlerName(HANDLER),
        version="0",
        endpoint=str(paths.base / "handler.sock"),
        filesystems=frozenset({"ext4", "xfs"}),
        features=frozenset(volumes.HandlerFeature),
    )
    handlers_socket = str(paths.crust_run / "handlers.sock")
    async with (
        service.serving(request.endpoint, service.Handler()),
        registration.Registration(handlers_socket, request) as session,
    ):
        yield session


@contextlib.asynccontextmanager
async def caller(paths: NodePaths, csi_socket: str) -> AsyncIterator[Kubelet]:
    """A kubelet that calls `csi_socket`."""
    co = Kubelet(paths.kubelet, csi_socket, paths.inspect_socket)
    try:
        yield co
    finally:
        await co.close()


async def wait_until_serving(csi_socket: str) -> None:
    """Return when a call to `csi_socket` has succeeded; waits for a server that is starting."""
    async with channel.connect(csi_socket) as connected:
        stub: csi_pb2_grpc.IdentityAsyncStub = csi_pb2_grpc.IdentityStub(connected)
        await stub.Probe(csi_pb2.ProbeRequest(), wait_for_ready=True, timeout=START_TIMEOUT_S)


def one_hop_socket(paths: NodePaths) -> str:
    """The proxy's socket directly in front of the driver."""
    return str(paths.kubelet / "plugins" / ONE_HOP / "csi.sock")


def _arguments(paths: NodePaths, volumes_root: Path) -> dict[str, list[str]]:
    root = (f"--target-root={paths.kubelet}", "--no-check-propagation")
    return {
        "driver": [
            f"--socket={paths.driver_socket}",
            f"--state-dir={paths.base / 'pool'}",
            "--create-pool",
            f"--run-dir={paths.base / 'driver-run'}",
            "--node-id=bench",
            *root,
        ],
        "shim": [
            f"--socket={paths.shim_socket}",
            f"--driver-socket={paths.driver_socket}",
            f"--runtime-socket={paths.crust_run / 'runtime.sock'}",
            f"--kubelet-root={paths.kubelet}",
            "--no-check-propagation",
        ],
        "proxy": [
            f"--run-dir={paths.crust_run}",
            f"--volumes-root={volumes_root}",
            f"--driver={paths.driver},{paths.csi_socket},{paths.shim_socket}",
            f"--driver={ONE_HOP},{one_hop_socket(paths)},{paths.driver_socket}",
            *root,
        ],
    }


def _node_toml(paths: NodePaths) -> str:
    return f"""
[proxy]
run_dir = "{paths.crust_run}"
volumes_root = "{paths.volumes}"
target_roots = ["{paths.kubelet}"]
check_propagation = false
[[proxy.drivers]]
name = "{paths.driver}"
socket = "{paths.csi_socket}"
backend = "{paths.shim_socket}"
[shim]
socket = "{paths.shim_socket}"
kubelet_root = "{paths.kubelet}"
check_propagation = false
{_own_driver(paths) if paths.driver == DRIVER else f'driver_socket = "{paths.driver_socket}"'}
"""


def _own_driver(paths: NodePaths) -> str:
    return f"""
[driver]
state_dir = "{paths.base / "pool"}"
create_pool = true
run_dir = "{paths.base / "driver-run"}"
node_id = "bench"
target_roots = ["{paths.kubelet}"]
check_propagation = false
"""


def clean_up(targets: Path, files: Path) -> None:
    """Unmount everything below `targets`, and detach the files below `files`, also after a benchmark that failed."""
    for mount in reversed(mountinfo.below(str(targets))):
        mount_api.unmount(mount.target)
    for device in loop.list_named(lambda _: True):
        if device.backing.startswith(f"{files}/"):
            loop.detach(device)


def _mount_tmpfs(path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "mode=0700", "crust-bench", str(path)]
    subprocess.run(command, check=True)
