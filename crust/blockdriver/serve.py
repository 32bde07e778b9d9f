"""The driver as a process.

Start: the lock of the run directory; if the pool is there, its lock (one driver per pool, however many sockets), its
identity, records and node state, the backend; the socket last, so that no call is answered before the state is known.
A pool that is absent is waited for: calls that need it are UNAVAILABLE meanwhile. Stop: the socket first, then every
running operation ends.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from crust import metrics
from crust.blockdriver.app import build
from crust.blockdriver.driver import Driver
from crust.blockdriver.node import guests
from crust.blockdriver.node.ephemeral_orphans import GRACE_S
from crust.blockdriver.pool_watch import PoolWatch, background
from crust.blockdriver.services.node_identity import CsiProfile
from crust.host.files import durable, flocks
from crust.rpc import wiring
from crust.rpc.daemon import Daemon, starting
from crust.rpc.gate import Gate
from crust.wire.csi.v1 import csi_pb2_grpc

LOCK = "driver.lock"
"""In the run directory."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def running(
    driver: Driver, *, socket: str, run_dir: str, take_over: bool = False
) -> AsyncIterator[Daemon]:
    """The driver, serving on `socket` while the block runs; every running operation ends before it is left.

    Raises `flocks.LockHeld` when another process has the pool, and what `server.serving` raises.
    """
    await asyncio.to_thread(durable.make_directories, run_dir, 0o700)
    async with (
        starting(os.path.join(run_dir, LOCK), take_over=take_over) as daemon,
        part(driver, daemon, socket=socket, run_dir=run_dir),
        daemon.serves(),
    ):
        yield daemon


@asynccontextmanager
async def part(
    driver: Driver,
    daemon: Daemon,
    *,
    socket: str,
    run_dir: str,
    wires: wiring.Wiring = wiring.SOCKETS,
) -> AsyncIterator[None]:
    """Serve as a part of the process `daemon` while the block runs; raises as `running`."""
    async with AsyncExitStack() as stack:
        daemon.before_release(driver.operations.idle)
        with driver.workers.used():  # also by the tasks that are started here
            watch = await _opened(driver, daemon)
        await stack.enter_async_context(
            wires.serving(
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
                admit=watch.check,
                driver=lambda: driver.name,
            )
        )
        metrics.export(*metrics.DRIVER)
        metrics.export_operations("driver", driver.operations.running)
        daemon.readiness.append(lambda: daemon.health.problems.get("pool"))
        _log.info("driver serves", extra={"driver": driver.name, "socket": socket})
        yield


async def _opened(driver: Driver, daemon: Daemon) -> PoolWatch:
    """Open the pool if it is there; what has it is closed before another process may write."""
    watch = PoolWatch(driver, lambda problem: daemon.health.report("pool", problem, is_fatal=False))
    owned = daemon.owned
    owned.push_async_callback(driver.node_rules.io_limits.guests.close)
    owned.push_async_callback(watch.let_go)
    owned.push_async_callback(driver.operations.drain)
    owned.push_async_callback(driver.controller_rules.coalescer.drain)
    owned.push_async_callback(watch.stop)
    problem = await watch.look()
    if problem is not None and isinstance(problem.__cause__, flocks.LockHeld):
        raise problem.__cause__
    await owned.enter_async_context(background("looks for the pool", watch.keep_looking()))
    return watch


async def run(  # noqa: PLR0913 - one per setting
    *,
    socket: str,
    state_dir: str,
    run_dir: str,
    node_id: str,
    pool_id_file: str = "",
    create_pool: bool = False,
    csi_profile: CsiProfile = "1.12",
    target_roots: tuple[str, ...] = ("/var/lib/kubelet",),
    overcommit: float = 1.0,
    max_volumes: int = 0,
    runtime_socket: str = "",
    io_cgroup: str = "",
    modify_window_s: float = 0,
    ephemeral_grace_s: float = GRACE_S,
    take_over: bool = False,
) -> None:
    """Serve until cancelled. Raises what keeps the driver from starting, after undoing the steps before it."""
    driver = build(
        state_dir=state_dir,
        run_dir=run_dir,
        node_id=node_id,
        pool_id_file=pool_id_file,
        create_pool=create_pool,
        csi_profile=csi_profile,
        target_roots=target_roots,
        overcommit=overcommit,
        max_volumes=max_volumes,
        runtime_guests=guests.runtime_guests(runtime_socket),
        io_cgroup=io_cgroup,
        modify_window_s=modify_window_s,
        ephemeral_grace_s=ephemeral_grace_s,
    )
    async with running(driver, socket=socket, run_dir=run_dir, take_over=take_over) as daemon:
        await daemon.forever()
