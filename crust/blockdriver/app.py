"""Composition of the driver: the only file that knows both of its parts."""

from pathlib import Path

from crust import operations, volumes
from crust.blockdriver import compose_controller, compose_node
from crust.blockdriver.controller import capacity
from crust.blockdriver.controller.orphans import VolumeGarbageCollector
from crust.blockdriver.driver import Driver, Stores
from crust.blockdriver.engines import files
from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.engines.protocol import Engine
from crust.blockdriver.node import guests
from crust.blockdriver.node.filesystems.filesystem_preparation import ToolLocks
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.live_volumes import LiveVolumes
from crust.blockdriver.node.node_state import NodeState
from crust.blockdriver.node.orphans import AttachmentGarbageCollector
from crust.blockdriver.records.attach_slots import AttachSlots
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.health import HealthCheck, snapshot_findings
from crust.blockdriver.records.models import ContentRecord, VolumeRecord
from crust.blockdriver.records.pool import Pool
from crust.blockdriver.records.records import Records
from crust.blockdriver.services.controller import Controller
from crust.blockdriver.services.deadlines import Reads
from crust.blockdriver.services.group_controller import GroupController
from crust.blockdriver.services.identity import Identity
from crust.blockdriver.services.node import Node
from crust.blockdriver.services.roles import NODE_ID_MAX_BYTES, CsiProfile, NodeIdentity, Role
from crust.blockdriver.services.snapshot_calls import SnapshotCalls
from crust.blockdriver.services.snapshot_metadata import SnapshotMetadata
from crust.blockdriver.snapshots.orphans import SnapshotGarbageCollector
from crust.blockdriver.snapshots.recovery import SnapshotRecovery
from crust.host.cgroups import throttling
from crust.host.filesystems import supported
from crust.host.process.workers import Workers
from crust.rpc.messages import limits
from crust.settings.driver import DEFAULT_MAX_VOLUMES, OWN_DRIVER

_ALL = Role()


def build(  # noqa: PLR0913 - one per setting
    *,
    run_dir: str,
    node_id: str,
    name: str = OWN_DRIVER,
    state_dir: str = "",
    pool_id_file: str = "",
    create_pool: bool = False,
    csi_profile: CsiProfile = "1.12",
    target_roots: tuple[str, ...] = ("/var/lib/kubelet",),
    engine: Engine | None = None,
    overcommit: float = 1.0,
    max_volumes: int = DEFAULT_MAX_VOLUMES,
    runtime_guests: guests.Guests | None = None,
    throttle: throttling.Throttle | None = None,
    io_cgroup: str = "",
    threads: Workers | None = None,
    role: Role = _ALL,
) -> Driver:
    """Compose a driver, without I/O. Volumes are sparse files below `state_dir` unless there is an `engine`.

    `pool_id_file` is where the pool's id is remembered, beside `state_dir` if it is empty; with `create_pool` a first
    start makes the pool. `runtime_guests` is the way to guests that have deferred volumes; without one they are out
    of reach. `role` is what of it others may call.
    """
    limits.required(node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
    identity = NodeIdentity(volumes.DriverName(name), node_id, csi_profile, role)
    threads = threads or Workers(f"the driver {name}")
    running = operations.KeyedOperations(threads)
    reads = Reads(running)
    engine = engine or files.engine(state_dir, pool_id_file, create=create_pool)
    stores = _stores(engine, run_dir, overcommit)
    live = LiveVolumes(stores.node_state, stores.access)
    slots = AttachSlots(node_id, stores.volume_records.index, live.attached_ids, max_volumes)
    reachable = runtime_guests or guests.UnreachableGuests()
    io_limits = IoLimits(live, throttle or throttling.Cgroups(io_cgroup), reachable)
    snapshots, sources = compose_controller.snapshots(stores, live, reachable, run_dir)
    health_check = _health_check(stores, snapshots)
    calls = SnapshotCalls(
        identity, snapshots.volume_snapshots, snapshots.group_snapshots, running, reads
    )
    controller_rules = compose_controller.rules(
        identity,
        stores,
        live,
        slots,
        io_limits,
        sources,
        health_check,
        calls,
        running,
    )
    node_rules = compose_node.rules(
        identity,
        stores,
        live,
        slots,
        io_limits,
        health_check,
        target_roots,
        controller_rules.modifier.grow_image if role.node_deployment else None,
        running,
    )
    return Driver(
        name=identity.driver,
        node_id=node_id,
        role=role,
        stores=stores,
        controller_rules=controller_rules,
        node_rules=node_rules,
        snapshots=snapshots,
        identity=Identity(
            identity.driver,
            stores.provisioning,
            csi_profile,
            running,
            role=role,
            is_ready=lambda: stores.pool.is_served,
        ),
        controller=Controller(identity, controller_rules, running, reads),
        group_controller=GroupController(calls),
        snapshot_metadata=SnapshotMetadata(calls, stores.provisioning, reads),
        node=Node(identity, node_rules, running, reads),
        volume_orphans=VolumeGarbageCollector(
            identity.driver, stores.volume_records, controller_rules.provisioner, running
        ),
        snapshot_orphans=SnapshotGarbageCollector(
            identity.driver,
            snapshots.volume_snapshots.snapshot_records,
            snapshots.groups,
            snapshots.volume_snapshots,
            snapshots.group_snapshots,
            running,
        ),
        attachment_orphans=AttachmentGarbageCollector(
            identity.driver, stores.node_state, stores.access, io_limits, running
        ),
        operations=running,
        workers=threads,
    )


def _stores(engine: Engine, run_dir: str, overcommit: float) -> Stores:
    pool = Pool(engine.home)

    def is_id(text: str) -> bool:
        return pool.ids.is_volume_id(text)

    volume_records = Records(engine.records(RecordKind.VOLUMES), VolumeRecord, is_id)
    return Stores(
        pool=pool,
        engine=engine,
        volume_records=volume_records,
        content_records=Records(engine.records(RecordKind.CONTENT), ContentRecord, is_id),
        node_state=NodeState(run_dir),
        tool_locks=ToolLocks(engine.tool_locks or Path(run_dir) / "tools.lock"),
        supported=SupportedCapabilities(
            engine.provisioning.modes, engine.provisioning.raw_modes, supported.SUPPORTED
        ),
        capacity=capacity.PoolCapacity(volume_records.index, engine.provisioning, overcommit),
    )


def _health_check(stores: Stores, snapshots: SnapshotRecovery) -> HealthCheck:
    records, groups = snapshots.volume_snapshots.snapshot_records, snapshots.groups
    return HealthCheck(
        stores.pool,
        stores.volume_records,
        stores.content_records,
        stores.provisioning,
        stores.capacity.available_bytes,
        lambda: snapshot_findings(records, groups, stores.provisioning),
    )
