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
from crust.blockdriver.controller import capacity, topology
from crust.blockdriver.controller.coalesce import Coalescer
from crust.blockdriver.controller.controller_publish import ControllerPublish
from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.controller.get_capacity import CapacityReport
from crust.blockdriver.controller.list_volumes import VolumeLister
from crust.blockdriver.controller.modify_volume import VolumeModifier
from crust.blockdriver.engines.files.engine import Files
from crust.blockdriver.engines.protocol import Backend
from crust.blockdriver.node import guests, io_limits
from crust.blockdriver.node.deferred_publish import DeferredNodePublish
from crust.blockdriver.node.ephemeral import EphemeralVolumes
from crust.blockdriver.node.node_expand import NodeExpand
from crust.blockdriver.node.node_publish import NodePublish
from crust.blockdriver.node.node_stage import NodeStage
from crust.blockdriver.node.node_state import NodeState
from crust.blockdriver.node.node_stats import NodeStats
from crust.blockdriver.node.node_unpublish import NodeUnpublish
from crust.blockdriver.node.orphans import GarbageCollector
from crust.blockdriver.node.state import State
from crust.blockdriver.records.health import HealthCheck
from crust.blockdriver.records.volume_records import VolumeRecords
from crust.blockdriver.services.controller import Controller, ControllerRules
from crust.blockdriver.services.group_controller import GroupController
from crust.blockdriver.services.identity import Identity
from crust.blockdriver.services.node import Node, Rules
from crust.blockdriver.services.node_identity import NODE_ID_MAX_BYTES, CsiProfile, NodeIdentity
from crust.blockdriver.services.snapshot_calls import SnapshotCalls
from crust.blockdriver.services.snapshot_metadata import SnapshotMetadata
from crust.blockdriver.snapshots import parts
from crust.host.cgroups import throttling
from crust.host.files import durable, flocks
from crust.host.filesystems import supported
from crust.host.process import boot
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
    snapshot_metadata: SnapshotMetadata
    node: Node
    garbage_collector: GarbageCollector
    snapshots: parts.Snapshots
    operations: operations.KeyedOperations
    modifier: VolumeModifier
    batches: Coalescer

    async def finish_changes(self) -> None:
        """Tell guests of limits that an earlier life wrote down and did not tell."""
        await self.batches.finish(await asyncio.to_thread(self.modifier.cut_short))

    def open(self) -> None:
        """Read what the disk and the kernel say. Once, before the first call. Blocks.

        Raises `node_state.UnreadableEntry` and whatever keeps the directories from being made.
        """
        self.snapshots.thaw()
        self.state.volume_records.open()
        self.state.backend.open()
        self.state.node_state.open(boot.boot_id())
        io_limits.recover(self.state)
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
    runtime_guests: guests.Guests | None = None,
    io_cgroup: str = "",
    modify_window_s: float = 0,
) -> Driver:
    """Compose a driver; touches nothing. Volumes are sparse files below `state_dir` unless `backend` says else.

    `runtime_guests` is the way to guests that have deferred volumes; without one they are out of reach.
    """
    limits.required(node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
    name = volumes.DriverName(DRIVER_NAME)
    shared = State(
        volume_records=VolumeRecords(os.path.join(state_dir, "records")),
        node_state=NodeState(run_dir),
        backend=backend or Files(os.path.join(state_dir, "images")),
        fs_types=supported.SUPPORTED,
        target_roots=target_roots,
        overcommit=overcommit,
        max_volumes=max_volumes,
        node_id=node_id,
        here=topology.value_of(node_id),
        guests=runtime_guests or guests.UnreachableGuests(),
        throttle=throttling.Cgroups(io_cgroup),
    )
    node_expand = NodeExpand(shared)
    room = capacity.of(shared)
    kept = parts.compose(shared, room, state_dir=state_dir, run_dir=run_dir)
    provisioner = Provisioner(shared, kept.content_sources, room)
    health_check = HealthCheck(
        shared.volume_records, shared.backend, room.available_bytes, kept.snapshot_findings
    )
    attacher = ControllerPublish(shared, node_id)
    here = NodeIdentity(name, node_id, csi_profile)
    node_stage, node_unpublish = NodeStage(shared, node_expand), NodeUnpublish(shared)
    rules = Rules(
        state=shared,
        node_stage=node_stage,
        node_publish=NodePublish(shared, node_expand),
        deferred_publish=DeferredNodePublish(shared),
        node_unpublish=node_unpublish,
        ephemeral=EphemeralVolumes(shared, provisioner, node_stage, node_unpublish),
        node_expand=node_expand,
        node_stats=NodeStats(shared, health_check, tells_condition=here.tells_condition),
        health_check=health_check,
    )
    running = operations.KeyedOperations()
    modifier = VolumeModifier(shared, room)
    batches = Coalescer(name, running, modifier.apply, window_s=modify_window_s)
    calls = SnapshotCalls(here, kept.volume_snapshots, kept.group_snapshots, running)
    controller_rules = ControllerRules(
        provisioner=provisioner,
        attacher=attacher,
        lister=VolumeLister(shared, attacher, health_check),
        health_check=health_check,
        offerer=CapacityReport(shared, room),
        snapshots=calls,
        batches=batches,
    )
    return Driver(
        name=name,
        state=shared,
        identity=Identity(name, shared.backend, csi_profile),
        controller=Controller(here, controller_rules, running),
        group_controller=GroupController(calls),
        snapshot_metadata=SnapshotMetadata(calls, shared.backend),
        node=Node(here, rules, running),
        garbage_collector=GarbageCollector(name, shared, provisioner, running),
        operations=running,
        snapshots=kept,
        modifier=modifier,
        batches=batches,
    )


@asynccontextmanager
async def running(
    driver: Driver, *, socket: str, state_dir: str, run_dir: str
) -> AsyncIterator[Driver]:
    """The driver, serving on `socket` while the block runs; every running operation ends before it is left.

    Raises `flocks.LockHeld` when another process has the pool, and what `server.serving` raises.
    """
    async with AsyncExitStack() as stack:
        lock = await asyncio.to_thread(_own, state_dir, run_dir)
        stack.callback(lock.close)
        stack.push_async_callback(asyncio.to_thread, driver.state.throttle.close)
        await asyncio.to_thread(driver.open)
        stack.push_async_callback(driver.state.guests.close)
        stack.push_async_callback(driver.operations.drain)
        stack.push_async_callback(driver.batches.drain)
        await stack.enter_async_context(_beside("sweeper", driver.garbage_collector.forever()))
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
        runtime_guests=guests.runtime_guests(runtime_socket),
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


def _own(state_dir: str, run_dir: str) -> flocks.ProcessLock:
    for path in (state_dir, run_dir):
        _make_directories(path)
    return flocks.ProcessLock.acquire(os.path.join(state_dir, "driver.lock"))


def _make_directories(path: str) -> None:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        _make_directories(parent)
    durable.make_directory(path, 0o700)
