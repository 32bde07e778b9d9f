"""Proxy, shims and the block driver as one process.

The process has one `Daemon`: the lock of the proxy's run directory, one health, one watchdog. The driver starts first
and the CO's sockets last, so that a CO reaches a complete process. A stop has the opposite order: each part drains
its operations while the parts that it calls still serve.
"""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from crust.blockdriver import serve
from crust.csi_shim import shim_process
from crust.host import start_questions
from crust.host.files import durable, locks
from crust.host.process import workers
from crust.node.settings import NodeSettings
from crust.proxy import proxy_process
from crust.rpc.serving.daemon import Daemon
from crust.rpc.serving.server import Ports


async def run(settings: NodeSettings) -> None:
    """Serve until cancelled. If the start fails, it raises the reason, and no socket is served."""
    await proxy_process.check_propagation(settings.proxy)
    for shim in settings.shim:
        await shim_process.check_mounts_seen(shim)
    for driver in settings.driver:
        await serve.check_host(driver)
    async with running(settings) as daemon:
        await start_questions.report(start_questions.PROXY_QUESTIONS, daemon.health)
        await daemon.forever()


@asynccontextmanager
async def running(settings: NodeSettings) -> AsyncIterator[Daemon]:
    ports = Ports(inner=settings.inner_sockets, shared=[settings.runtime_socket])
    async with proxy_process.owning(settings.proxy) as daemon, AsyncExitStack() as stack:
        for driver in settings.driver:
            await workers.run(durable.make_directories, driver.run_dir, 0o700)
            # excludes a `crust driver` of the same directory: the process's own lock is the proxy's
            path = os.path.join(driver.run_dir, serve.LOCK)
            lock = await workers.run(locks.ProcessLock.acquire, path)
            stack.callback(lock.close)
            part = serve.part(
                serve.driver_of(driver, ports.connect),
                daemon,
                socket=driver.socket,
                run_dir=driver.run_dir,
                ports=ports,
            )
            await stack.enter_async_context(part)
        for shim in settings.shim:
            await stack.enter_async_context(shim_process.part(shim, daemon, ports=ports))
        await stack.enter_async_context(proxy_process.part(settings.proxy, daemon, ports=ports))
        await stack.enter_async_context(daemon.serves())
        yield daemon
