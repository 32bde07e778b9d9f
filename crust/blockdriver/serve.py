"""The driver as a process.

Start: the pool's lock (one driver per pool, however many sockets), the pool's identity, records and node state, the
backend, the socket last, so that no call is answered before the state is known. Stop: the socket first, then every
running operation ends.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from crust.blockdriver.app import build
from crust.blockdriver.driver import Driver
from crust.blockdriver.node import guests
from crust.blockdriver.services.node_identity import CsiProfile
from crust.host.files import durable
from crust.rpc import server
from crust.rpc.daemon import Daemon, starting
from crust.rpc.gate import Gate
from crust.wire.csi.v1 import csi_pb2_grpc

_log = logging.getLogger(__name__)


@asynccontextmanager
async def running(
    driver: Driver, *, socket: str, state_dir: str, run_dir: str, take_over: bool = False
) -> AsyncIterator[Daemon]:
    """The driver, serving on `socket` while the block runs; every running operation ends before it is left.

    Raises `flocks.LockHeld` when another process has the pool, and what `server.serving` raises.
    """
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(_make_own, state_dir, run_dir)
        lock_path = os.path.join(state_dir, "driver.lock")
        daemon = await stack.enter_async_context(starting(lock_path, take_over=take_over))
        daemon.before_release(driver.operations.idle)
        with driver.workers.used():  # also by the tasks that are started here
            await _open(driver, daemon.owned)
        await stack.enter_async_context(
            server.serving(
                socket,
                lambda s: csi_pb2_grpc.add_IdentityServicer_to_server(driver.identity, s),
                lambda s: csi_pb2_grpc.add_ControllerServicer_to_server(driver.controller, s),
                lambda s: csi_pb2_grpc.add_GroupControllerServicer_to_server(
                    driver.group_controller, s
                ),
                lambda s: csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(
                    driver.snapshot_metadata, s
                ),
                lambda s: csi_pb2_grpc.add_NodeServicer_to_server(driver.node, s),
                name="driver",
                lock_path=os.path.join(run_dir, "socket.lock"),
                daemon=daemon,
                gate=Gate(),
            )
        )
        await stack.enter_async_context(daemon.serves())
        _log.info("driver serves", extra={"driver": driver.name, "socket": socket})
        yield daemon


async def _open(driver: Driver, owned: AsyncExitStack) -> None:
    """Read the state and start the background tasks; `owned` ends them before another process may write."""
    await asyncio.to_thread(driver.open)
    owned.push_async_callback(driver.node_rules.io_limits.guests.close)
    owned.push_async_callback(driver.operations.drain)
    owned.push_async_callback(driver.controller_rules.coalescer.drain)
    await owned.enter_async_context(
        _background("garbage collection", driver.keep_collecting_garbage())
    )
    await owned.enter_async_context(
        _background("thaw of guests", driver.snapshots.guest_freezer.keep_recovering())
    )
    await owned.enter_async_context(_background("limits of guests", driver.finish_changes()))


async def run(  # noqa: PLR0913 - one per setting
    *,
    socket: str,
    state_dir: str,
    run_dir: str,
    node_id: str,
    csi_profile: CsiProfile = "1.12",
    target_roots: tuple[str, ...] = ("/var/lib/kubelet",),
    overcommit: float = 1.0,
    max_volumes: int = 0,
    runtime_socket: str = "",
    io_cgroup: str = "",
    modify_window_s: float = 0,
    take_over: bool = False,
) -> None:
    """Serve until cancelled. Raises what keeps the driver from starting, after undoing the steps before it."""
    driver = build(
        state_dir=state_dir,
        run_dir=run_dir,
        node_id=node_id,
        csi_profile=csi_profile,
        target_roots=target_roots,
        overcommit=overcommit,
        max_volumes=max_volumes,
        runtime_guests=guests.runtime_guests(runtime_socket),
        io_cgroup=io_cgroup,
        modify_window_s=modify_window_s,
    )
    async with running(
        driver, socket=socket, state_dir=state_dir, run_dir=run_dir, take_over=take_over
    ) as daemon:
        await daemon.forever()


@asynccontextmanager
async def _background(name: str, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_ended)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        extra = {"task": task.get_name()}
        _log.error("a background task has ended", extra=extra, exc_info=task.exception())


def _make_own(*directories: str) -> None:
    for path in directories:
        _make_directories(path)


def _make_directories(path: str) -> None:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        _make_directories(parent)
    durable.make_directory(path, 0o700)
