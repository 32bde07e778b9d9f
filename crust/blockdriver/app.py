"""The driver put together, and served: the one place that knows all its parts.

Start: the pool's lock (one driver per pool, however many sockets), records and ledger, the backend, the socket last,
so that nobody is answered before the state is known. Stop: the socket first, then every running operation ends.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from crust import operations, volumes
from crust.blockdriver import capacity, guests, limiting, snapshots, topology
from crust.blockdriver.attaching import Attacher
from crust.blockdriver.backends.files import Files
from crust.blockdriver.backends.protocol import Backend
from crust.blockdriver.batching import Batches
from crust.blockdriver.changed_blocks import ChangedBlocks
from crust.blockdriver.changing import Changer
from crust.blockdriver.controller import Controller, ControllerRules
from crust.blockdriver.deferring import Deferrer
from crust.blockdriver.ephemeral import Ephemeral
from crust.blockdriver.growing import Grower
from crust.blockdriver.health import Examiner
from crust.blockdriver.here import NODE_ID_MAX_BYTES, CsiProfile, Here
from crust.blockdriver.identity import Identity
from crust.blockdriver.ledger import Ledger
from crust.blockdriver.leftovers import Sweeper
from crust.blockdriver.listing import Lister
from crust.blockdriver.node import Node, Rules
from crust.blockdriver.offering import Offerer
from crust.blockdriver.provisioning import Provisioner
from crust.blockdriver.publishing import Publisher
from crust.blockdriver.registry import Registry
from crust.blockdriver.snapshot_calls import GroupController, SnapshotCalls
from crust.blockdriver.staging import Stager
from crust.blockdriver.state import State
from crust.blockdriver.unpublishing import Unpublisher
from crust.blockdriver.usage import Meter
from crust.host import boot, durable, filesystems, ownership, throttling
from crust.rpc import limits, server
from crust.wire.csi.v1 import csi_pb2_grpc

DRIVER_NAME = "block.csi.crust.dev"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver that is ready to be served, or called in process (the shim wraps `node` and `controller`)."""

    name: volumes.DriverName
    state: State
    identity: Identity
    controller: Controller
    group_controller: GroupController
    snapshot_metadata: ChangedBlocks
    node: Node
    sweeper: Sweeper
    snapshots: snapshots.Snapshots
    operations: operations.KeyedOperations
    changer: Changer
    batches: Batches

    async def finish_changes(self) -> None:
        """Tell guests of limits that an earlier life wrote down and did not tell."""
        await self.batches.finish(await asyncio.to_thread(self.changer.cut_short))

    def open(self) -> None:
        """Read what the disk and the kernel say. Once, before the first call. Blocks.

        Raises `ledger.UnreadableEntry` and whatever keeps the directories from being made.
        """
        self.snapshots.thaw()
        self.state.registry.open()
        self.state.backend.open()
        self.state.ledger.open(boot.boot_id())
        limiting.recover(self.state)
        self.snapshots.open()


def build(  # noqa: PLR0913 - one per setting
    *,
    state_dir: str,
    run_dir: str,
    node_id: str,
    csi_profile: CsiProfile = "1.12",
    target_roots: tuple[str, ...] = ("/var/lib/kubelet",),
    backend: Backend | None = None,
    overcommit: float = 1.0,
    max_volumes: int = 0,
    reach: guests.Guests | None = None,
    io_cgroup: str = "",
    modify_window_s: float = 0,
) -> Driver:
    """Compose a driver; touches nothing. Volumes are sparse files below `state_dir` unless `backend` says else.

    `reach` is the way to guests that have deferred volumes; without one they are out of reach.
    """
    limits.required(node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
    name = volumes.DriverName(DRIVER_NAME)
    shared = State(
        registry=Registry(os.path.join(state_dir, "records")),
        ledger=Ledger(run_dir),
        backend=backend or Files(os.path.join(state_dir, "images")),
        fs_types=filesystems.SUPPORTED,
        target_roots=target_roots,
        overcommit=overcommit,
        max_volumes=max_volumes,
        here=topology.value_of(node_id),
        guests=reach or guests.OutOfReach(),
        throttle=throttling.Cgroups(io_cgroup),
    )
    grower = Grower(shared)
    room = capacity.of(shared)
    kept = snapshots.compose(shared, room, state_dir=state_dir, run_dir=run_dir)
    provisioner = Provisioner(shared, kept.origins, room)
    examiner = Examiner(shared, room, kept.troubles)
    attacher = Attacher(shared, node_id)
    here = Here(name, node_id, csi_profile)
    stager, unpublisher = Stager(shared, grower), Unpublisher(shared)
    rules = Rules(
        state=shared,
        stager=stager,
        publisher=Publisher(shared, grower),
        deferrer=Deferrer(shared),
        unpublisher=unpublisher,
        ephemeral=Ephemeral(shared, provisioner, stager, unpublisher),
        grower=grower,
        meter=Meter(shared, examiner, tells_condition=here.tells_condition),
        examiner=examiner,
    )
    running = operations.KeyedOperations()
    changer = Changer(shared, room)
    batches = Batches(name, running, changer.apply, window_s=modify_window_s)
    calls = SnapshotCalls(here, kept.snapshotter, kept.grouper, running)
    controller_rules = ControllerRules(
        provisioner=provisioner,
        attacher=attacher,
        lister=Lister(shared, attacher, examiner),
        examiner=examiner,
        offerer=Offerer(shared, room),
        snapshots=calls,
        batches=batches,
    )
    return Driver(
        name=name,
        state=shared,
        identity=Identity(name, shared.backend, csi_profile),
        controller=Controller(here, controller_rules, running),
        group_controller=GroupController(calls),
        snapshot_metadata=ChangedBlocks(calls, shared.backend),
        node=Node(here, rules, running),
        sweeper=Sweeper(name, shared, provisioner, running),
        operations=running,
        snapshots=kept,
        changer=changer,
        batches=batches,
    )


@asynccontextmanager
async def running(
    driver: Driver, *, socket: str, state_dir: str, run_dir: str
) -> AsyncIterator[Driver]:
    """The driver, serving on `socket` while the block runs; every running operation ends before it is left.

    Raises `ownership.AlreadyOwned` when another process has the pool, and what `server.serving` raises.
    """
    async with AsyncExitStack() as stack:
        lock = await asyncio.to_thread(_own, state_dir, run_dir)
        stack.callback(lock.close)
        stack.push_async_callback(asyncio.to_thread, driver.state.throttle.close)
        await asyncio.to_thread(driver.open)
        stack.push_async_callback(driver.state.guests.close)
        stack.push_async_callback(driver.operations.drain)
        stack.push_async_callback(driver.batches.drain)
        await stack.enter_async_context(_beside("sweeper", driver.sweeper.forever()))
        await stack.enter_async_context(
            _beside("guests' thaw", driver.snapshots.guest_freezer.keep_recovering())
        )
        await stack.enter_async_context(_beside("guests' limits", driver.finish_changes()))
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
            )
        )
        _log.info("driver serves", extra={"driver": driver.name, "socket": socket})
        yield driver


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
) -> None:
    """Serve until cancelled. Raises what keeps the driver from starting, with nothing half-served."""
    driver = build(
        state_dir=state_dir,
        run_dir=run_dir,
        node_id=node_id,
        csi_profile=csi_profile,
        target_roots=target_roots,
        overcommit=overcommit,
        max_volumes=max_volumes,
        reach=guests.reach(runtime_socket),
        io_cgroup=io_cgroup,
        modify_window_s=modify_window_s,
    )
    async with running(driver, socket=socket, state_dir=state_dir, run_dir=run_dir):
        await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def _beside(name: str, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_ended)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        told = {"task": task.get_name()}
        _log.error("what runs beside the calls has ended", extra=told, exc_info=task.exception())


def _own(state_dir: str, run_dir: str) -> ownership.ProcessLock:
    for path in (state_dir, run_dir):
        _make_directories(path)
    return ownership.ProcessLock.acquire(os.path.join(state_dir, "driver.lock"))


def _make_directories(path: str) -> None:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        _make_directories(parent)
    durable.make_directory(path, 0o700)
