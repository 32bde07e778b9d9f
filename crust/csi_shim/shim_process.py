"""The shim as a process, in front of a driver's socket. The driver does not change.

All other calls pass through as bytes. A status of the driver reaches the caller unchanged.
"""

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from crust.core import metrics
from crust.core.operations import KeyedOperations
from crust.csi_shim.deferral import Deferral, RuntimeClient
from crust.csi_shim.settings import ShimSettings
from crust.csi_shim.wrap import private_directories
from crust.csi_shim.wrap.node_shim import NodeShim, Wrapping
from crust.csi_shim.wrap.staging import Staging
from crust.csi_shim.wrap.wrapped import WrappedVolumes
from crust.host.mounts import propagation
from crust.host.process import syscalls, workers
from crust.host.process.workers import Workers
from crust.rpc.csi_driver import CsiDriver
from crust.rpc.messages import extensions
from crust.rpc.serving.daemon import Daemon, starting
from crust.rpc.serving.server import SOCKETS, Ports
from crust.rpc.serving.service import Service, probe
from crust.rpc.serving.worker_watch import WorkerWatch


async def run(settings: ShimSettings) -> None:
    """Serve the shim until cancelled; raises as `serving` does, and `MountsNotSeen`."""
    await check_mounts_seen(settings)
    async with serving(settings) as daemon:
        await daemon.forever()


async def check_mounts_seen(settings: ShimSettings) -> None:
    """Raise `MountsNotSeen` if the shim cannot see a wrapped driver's mounts."""
    if settings.wrap and settings.check_propagation and not settings.controller:
        directory = private_directories.root(settings.kubelet_root)
        await workers.run(propagation.check_seen, directory)


@asynccontextmanager
async def serving(
    settings: ShimSettings, *, threads: Workers | None = None
) -> AsyncIterator[Daemon]:
    """Serve the shim while the block runs. Raises as `server.serving`, and `DetachNotChecked`, before it serves."""
    async with contextlib.AsyncExitStack() as stack:
        if settings.controller:
            from crust.csi_shim.controller import controller_shim  # a node need not load it

            users = await stack.enter_async_context(controller_shim.users_of(settings))
        directory = os.path.dirname(settings.socket)
        with syscalls.translating(f"cannot make the directory {directory}"):
            await workers.run(os.makedirs, directory, 0o700, exist_ok=True)
        daemon = await stack.enter_async_context(starting(f"{settings.socket}.lock"))
        if settings.controller:
            shim = controller_shim.part(settings, daemon, users)
        else:
            shim = part(settings, daemon, threads=threads)
        async with shim, daemon.serves():
            yield daemon


@asynccontextmanager
async def part(
    settings: ShimSettings,
    daemon: Daemon,
    *,
    ports: Ports = SOCKETS,
    threads: Workers | None = None,
) -> AsyncIterator[None]:
    """Serve as a part of the process `daemon` while the block runs."""
    async with (
        ports.connect(settings.driver_socket) as port,
        ports.connect(settings.runtime_socket) as back,
        contextlib.aclosing(CsiDriver(port)) as driver,
        contextlib.AsyncExitStack() as stack,
    ):
        runtime = RuntimeClient(back)
        has_condition = settings.csi_profile == "1.12"
        deferral = Deferral(driver, runtime, report_condition=has_condition)
        methods = deferral.methods()
        pool = threads or Workers(f"the shim at {settings.socket}", limit=64)
        if settings.wrap:
            operations = KeyedOperations(pool)
            watch = WorkerWatch(pool, operations, daemon.health)
            await stack.enter_async_context(watch.running())  # ends when all operations have ended
            stack.push_async_callback(operations.drain)
            wrapped = WrappedVolumes(driver.node, Staging(driver.node), runtime)
            wrapping = Wrapping(settings.kubelet_root, settings.driver_name)
            methods = NodeShim(driver, deferral, wrapped, wrapping, operations).methods()
            metrics.export_workers(f"shim {settings.socket}", lambda: pool.load)
        service = Service(
            "shim",
            methods,
            probe(port, extensions.SHIM_VERSION),
            others=port,
            health=daemon.health,
            driver=driver.known_name,
        )
        daemon.readiness.append(
            lambda: driver.missing(settings.driver_name, settings.driver_socket)
        )
        with pool.used():  # by the calls that are served
            await stack.enter_async_context(ports.serving(settings.socket, service, lock_path=None))
        yield
