"""The driver as a process.

Start: the lock of the run directory; if the pool is there, its lock (one driver per pool, however many sockets), its
identity, records and node state, the engine; the socket last, so that no call is answered before the state is known.
The driver waits for an absent pool: calls that need it are UNAVAILABLE meanwhile. Stop: the socket first, then every
running operation ends.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from crust.blockdriver import guests
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.user import CephUser, key_of
from crust.blockdriver.driver import Driver, build
from crust.blockdriver.engines import files, protocol, rbd
from crust.blockdriver.pool_watch import PoolWatch
from crust.blockdriver.pools import Pools
from crust.blockdriver.records.node_state import AttachSlots
from crust.blockdriver.services.roles import Role
from crust.blockdriver.settings import DEFAULT_POOL, LOCAL_ENGINES, DriverSettings
from crust.core import errors, metrics, volumes
from crust.core.supervised import supervised
from crust.host import start_questions
from crust.host.files import durable, locks
from crust.host.mounts import propagation
from crust.host.process import workers
from crust.kubernetes_api import api, volumes_in_use
from crust.rpc.port import Port, SocketPort
from crust.rpc.serving.daemon import Daemon, starting
from crust.rpc.serving.server import SOCKETS, Ports
from crust.rpc.serving.service import Service
from crust.rpc.serving.worker_watch import WorkerWatch

LOCK = "driver.lock"
"""In the run directory."""

OPENED_WITHIN_S = 10.0
"""The wait for each of several pools at the start: a disk that hangs keeps no other pool closed."""

FENCE_PERIOD_S = 30.0
"""The cluster lists a client of a node without power as connected for as long."""

ENGINES: Mapping[str, Callable[[DriverSettings], protocol.Engine]] = {
    "files": lambda own: files.engine(own.state_dir, own.pool_id_file, create=own.create_pool),
    "rbd": lambda settings: _rbd(settings),
}
"""By the setting `engine`; made without I/O."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def running(driver: Driver, *, socket: str, run_dir: str) -> AsyncIterator[Daemon]:
    """The driver, serving on `socket` while the block runs; every running operation ends before it is left.

    Raises `locks.LockHeld` if another process has the pool or the run directory, and the errors of `server.serving`.
    """
    await workers.run(durable.make_directories, run_dir, 0o700)
    async with (
        starting(os.path.join(run_dir, LOCK)) as daemon,
        part(driver, daemon, socket=socket, run_dir=run_dir),
        daemon.serves(),
    ):
        yield daemon


@asynccontextmanager
async def part(
    driver: Driver, daemon: Daemon, *, socket: str, run_dir: str, ports: Ports = SOCKETS
) -> AsyncIterator[None]:
    """Serve as a part of the process `daemon` while the block runs; raises as `running`."""
    async with AsyncExitStack() as stack:
        wait_s = OPENED_WITHIN_S if driver.further else None
        watches = {
            pool.pool_name: await stack.enter_async_context(_pool(pool, daemon, wait_s))
            for pool in (driver, *driver.further.values())
        }
        service = Service(
            "driver",
            *Pools(watches, daemon.health).methods(),
            health=daemon.health,
            driver=lambda: driver.name,
            admit=driver.role.check_method,
        )
        lock_path = os.path.join(run_dir, "socket.lock")
        await stack.enter_async_context(ports.serving(socket, service, lock_path=lock_path))
        _log.info("driver serves", extra={"driver": driver.name, "socket": socket})
        yield


@asynccontextmanager
async def _pool(driver: Driver, daemon: Daemon, wait_s: float | None) -> AsyncIterator[PoolWatch]:
    """The driver of one pool, watched; raises as `running`. A disk that hangs delays the start by `wait_s`."""
    async with AsyncExitStack() as stack:
        # dozens of unmounts on a slow disk take all threads, and end: no reason for a restart
        threads = WorkerWatch(driver.workers, driver.stores.running, daemon.health, is_fatal=False)
        await stack.enter_async_context(threads.running())  # ends when all operations have ended
        with driver.workers.used():  # the tasks that start here use them too
            watch = PoolWatch(driver, daemon.health, daemon.end)
            # its users close before another process may write
            stack.push_async_callback(driver.node.io_limits.guests.close)
            stack.push_async_callback(watch.let_go)
            stack.push_async_callback(driver.stores.running.drain)
            stack.push_async_callback(watch.stop)
            looking = supervised(
                "looks for the pool", watch.keep_looking, daemon.health, of=driver.shown
            )
            await stack.enter_async_context(looking)
            await asyncio.wait([watch.looked], timeout=wait_s)
            if watch.problem is not None and isinstance(watch.problem.__cause__, locks.LockHeld):
                raise watch.problem.__cause__
        metrics.export_snapshots(driver.shown, driver.count_snapshots)
        metrics.export(*metrics.DRIVER)
        metrics.export_operations(f"driver {driver.shown}", driver.stores.running.running)
        metrics.export_workers(f"driver {driver.shown}", lambda: driver.workers.load)
        daemon.readiness.append(lambda: daemon.health.problems.get(watch.component))
        yield watch


async def check_host(settings: DriverSettings) -> None:
    """Raise the error that would make a running driver useless on this host."""
    if settings.mode != "controller" and settings.check_propagation:
        await workers.run(propagation.check_propagation, settings.target_roots)


def driver_of(settings: DriverSettings, connect: Callable[[str], Port] = SocketPort) -> Driver:
    """The driver that the settings describe, composed without I/O; `connect` leads to the proxy's Runtime API."""
    slots = AttachSlots(settings.node_id, settings.max_volumes)
    drivers = {}
    for name, own in settings.by_pool().items():
        is_shared = own.engine not in LOCAL_ENGINES
        drivers[name] = build(
            engine=ENGINES[own.engine](own),
            role=Role(own.mode, own.node_deployment, is_shared, own.csi_profile),
            run_dir=own.run_dir,
            node_id=own.node_id,
            name=own.driver_name,
            target_roots=own.target_roots,
            overcommit=own.overcommit,
            pool_low_percent=own.pool_low_percent,
            thick=own.provisioning == "thick",
            reserve_snapshots=own.reserve_snapshots,
            max_snapshots_per_volume=own.max_snapshots_per_volume,
            attach_slots=slots,
            runtime_guests=guests.Guests(own.runtime_socket, connect),
            io_cgroup=own.io_cgroup,
            pool_name=name,
        )
    return replace(drivers.pop(DEFAULT_POOL), further=drivers)


def _rbd(settings: DriverSettings) -> protocol.Engine:
    ceph = settings.rbd
    assert ceph is not None, "checked with the settings"
    if not ceph.user:
        return rbd.node_engine(
            ceph.monitors,
            ceph.pool,
            ceph.namespace,
            run_dir=settings.run_dir,
            node=settings.node_id,
        )
    user = CephUser(ceph.monitors, ceph.user, key_of(ceph.key_file, ceph.user))
    place = rbd.Namespace.of(Connection(user), ceph.pool, ceph.namespace)
    return rbd.engine(
        place,
        run_dir=settings.run_dir,
        create=ceph.create_pool,
        node=settings.node_id,
        trash_keep_s=ceph.trash_keep_s,
    )


async def keep_fencing(
    fence: protocol.Fence,
    declared: Callable[[], Awaitable[frozenset[str]]],
    volume_ids: Callable[[], Iterable[volumes.VolumeId]],
    period_s: float = FENCE_PERIOD_S,
) -> None:
    """Cut the nodes that `declared` returns, which are gone for good now, off from the volumes of `volume_ids`, and
    free their claims.

    Until it is cancelled; `supervised` starts it again. No call triggers it: pods that wait for a claim go on by
    themselves. A node that only does not answer is never in the result of `declared`. Even so a pass leaves a
    connected client alone, because it lives (`HolderConnected`), and repeats until the client has ended, or
    `declared` omits the node. A pass reads the claim of each volume: 0.4 ms. After a pass that fails, the metric
    still counts the nodes that wait.
    """
    while True:
        try:
            gone_nodes, waiting = await declared(), frozenset[str]()
            if gone_nodes:
                waiting = await workers.run(fence, volume_ids(), gone_nodes)
        except errors.CrustError as err:
            metrics.fencing_failures.inc()
            _log.warning("nodes that are gone are not fenced", extra={"error": err})
        except Exception:
            metrics.fencing_failures.inc()
            raise
        else:
            metrics.nodes_waiting_for_fencing.set(len(waiting))
        await asyncio.sleep(period_s)


async def run_driver(settings: DriverSettings) -> None:
    """Serve until cancelled. Raises the error of a failed start, after undoing the steps before it:
    `api.UnusableKubeconfig` and others.
    """
    await check_host(settings)
    driver = driver_of(settings)
    serving = running(driver, socket=settings.socket, run_dir=settings.run_dir)
    async with AsyncExitStack() as stack:
        nodes = None
        if settings.kubernetes is not None:
            # a bad kubeconfig ends the start before the driver serves a call
            client = await workers.run(api.client, settings.kubernetes.kubeconfig)
            stack.push_async_callback(client.close)
            nodes = partial(volumes_in_use.out_of_service, client, driver.name)
        daemon = await stack.enter_async_context(serving)
        if nodes is not None:
            fence = driver.stores.engine.fence
            assert fence is not None, "checked with the settings"
            metrics.export(*metrics.FENCING)
            work = partial(keep_fencing, fence, nodes, driver.stores.volume_records.index.page)
            fencing_loop = supervised("fencing of lost nodes", work, daemon.health)
            with driver.workers.used():  # the task that starts here uses them
                await stack.enter_async_context(fencing_loop)
        if driver.role.has_node:
            await start_questions.report(start_questions.NODE_QUESTIONS, daemon.health)
        await daemon.forever()
