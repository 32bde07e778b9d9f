"""Composition of the driver: the only file that knows both of its parts."""

from pathlib import Path

from crust.blockdriver import guests
from crust.blockdriver.controller import capacity
from crust.blockdriver.controller.capacity import CapacityReport
from crust.blockdriver.controller.controller_publish import ControllerPublish
from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.controller.list_volumes import Validation, VolumeLister
from crust.blockdriver.controller.modify_volume import (
    EnforcedByStorage,
    InterruptedChanges,
    VolumeModifier,
)
from crust.blockdriver.controller.settlement import Settlement
from crust.blockdriver.driver import Driver, Stores
from crust.blockdriver.engines import files
from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.engines.protocol import Engine
from crust.blockdriver.node.filesystems.filesystem_preparation import FilesystemPreparation
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.node_expand import ImageGrowth, NodeExpand
from crust.blockdriver.node.node_stage import NodeStage
from crust.blockdriver.node.node_state import NodeState
from crust.blockdriver.node.node_stats import NodeStats
from crust.blockdriver.node.node_unpublish import NodeUnpublish, NodeUnstage
from crust.blockdriver.node.orphans import AttachmentGarbageCollector
from crust.blockdriver.node.publish.deferred_publish import DeferredNodePublish
from crust.blockdriver.node.publish.host_image import HostImage
from crust.blockdriver.node.publish.node_publish import NodePublish
from crust.blockdriver.node.publish.publish_rules import PublishCheck
from crust.blockdriver.records.attach_slots import AttachSlots
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.health import HealthCheck
from crust.blockdriver.records.models import (
    ContentRecord,
    SnapshotSet,
    VolumeRecord,
)
from crust.blockdriver.records.records import IndexedRecords, Records
from crust.blockdriver.services.controller import Controller, ControllerRules
from crust.blockdriver.services.deadlines import Calls
from crust.blockdriver.services.identity import Identity
from crust.blockdriver.services.node import Node, NodeRules
from crust.blockdriver.services.pool_service import PoolService
from crust.blockdriver.services.roles import NODE_ID_MAX_BYTES, CsiProfile, NodeIdentity, Role
from crust.blockdriver.services.snapshots import SnapshotCalls
from crust.blockdriver.snapshots.content_source import ContentSources
from crust.blockdriver.snapshots.freeze_intents import Intents
from crust.blockdriver.snapshots.freezer import Freezer
from crust.blockdriver.snapshots.snapshot_sets import SnapshotSets
from crust.core import operations, volumes
from crust.core.settings.driver import (
    DEFAULT_MAX_VOLUMES,
    DEFAULT_POOL_LOW_PERCENT,
    OWN_DRIVER,
)
from crust.host.cgroups import throttling
from crust.host.filesystems import supported
from crust.host.filesystems.tool_locks import ToolLocks
from crust.host.process.workers import Workers
from crust.rpc.messages import limits

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
    pool_low_percent: int = DEFAULT_POOL_LOW_PERCENT,
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
    calls = Calls(identity.driver, running)
    engine = engine or files.engine(state_dir, pool_id_file, create=create_pool)
    reachable = runtime_guests or guests.Guests()
    pool, provisioning = engine.home, engine.provisioning

    def is_volume_id(text: str) -> bool:
        return pool.ids.is_volume_id(text)

    def is_set_id(text: str) -> bool:
        return pool.ids.is_set_id(text)

    records = IndexedRecords(engine.records(RecordKind.VOLUMES), VolumeRecord, is_volume_id)
    contents = Records(engine.records(RecordKind.CONTENT), ContentRecord, is_volume_id)
    sets = IndexedRecords(engine.records(RecordKind.SNAPSHOTS), SnapshotSet, is_set_id)
    node_state = NodeState(run_dir, engine.access)
    pool_capacity = capacity.PoolCapacity(records.index, provisioning, overcommit, pool_low_percent)
    stores = Stores(
        identity=identity,
        running=running,
        pool=pool,
        engine=engine,
        volume_records=records,
        content_records=contents,
        snapshot_sets=sets,
        node_state=node_state,
        tool_locks=ToolLocks(engine.tool_locks or Path(run_dir) / "tools.lock"),
        supported=SupportedCapabilities(
            provisioning.modes, provisioning.raw_modes, supported.SUPPORTED
        ),
        capacity=pool_capacity,
        attach_slots=AttachSlots(node_id, records.index, node_state.attached_ids, max_volumes),
        io_limits=IoLimits(node_state, throttle or throttling.Throttle(io_cgroup), reachable),
        health_check=HealthCheck(
            pool, records, contents, sets, provisioning, pool_capacity.available_bytes
        ),
    )
    freezer = Freezer(Intents(run_dir), stores.access, reachable)
    snapshots = _snapshots(stores, freezer)
    controller_rules = _controller_rules(stores, snapshots, freezer)
    grow_image = controller_rules.modifier.grow_image if role.node_deployment else None
    node_rules = _node_rules(stores, target_roots, grow_image)
    snapshot_calls = SnapshotCalls(identity, snapshots, provisioning, calls)
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
        ),
        controller=Controller(identity, controller_rules, snapshot_calls, calls),
        pool=PoolService(stores.capacity, controller_rules.lister, stores.node_state, calls),
        snapshot_calls=snapshot_calls,
        node=Node(identity, node_rules, calls),
        settlement=Settlement(identity.driver, stores.volume_records, stores.provisioning, running),
        attachment_orphans=AttachmentGarbageCollector(
            identity.driver, stores.node_state, stores.access, stores.io_limits, running
        ),
        operations=running,
        workers=threads,
    )


def _snapshots(stores: Stores, freezer: Freezer) -> SnapshotSets:
    return SnapshotSets(
        pool=stores.pool,
        volume_records=stores.volume_records,
        content_records=stores.content_records,
        records=stores.snapshot_sets,
        provisioning=stores.provisioning,
        node=stores.node_state,
        capacity=stores.capacity,
        freezer=freezer,
    )


def _controller_rules(stores: Stores, snapshots: SnapshotSets, freezer: Freezer) -> ControllerRules:
    """The rules of the controller part."""
    sources = ContentSources(
        volume_records=stores.volume_records,
        content_records=stores.content_records,
        snapshot_sets=snapshots,
        provisioning=stores.provisioning,
        node=stores.node_state,
        freezer=freezer,
    )
    publisher = ControllerPublish(
        stores.pool,
        stores.volume_records,
        stores.node_state,
        stores.supported,
        stores.attach_slots,
        stores.identity.node_id,
        stores.provisioning,
    )
    in_storage = stores.engine.limits
    modifier = VolumeModifier(
        volume_records=stores.volume_records,
        provisioning=stores.provisioning,
        node=stores.node_state,
        enforcement=EnforcedByStorage(in_storage) if in_storage else stores.io_limits,
        capacity=stores.capacity,
        supported=stores.supported,
    )
    return ControllerRules(
        provisioner=Provisioner(
            pool=stores.pool,
            volume_records=stores.volume_records,
            content_records=stores.content_records,
            provisioning=stores.provisioning,
            node=stores.node_state,
            sources=sources,
            capacity=stores.capacity,
            supported=stores.supported,
            segment=stores.identity.segment,
            limits=in_storage,
        ),
        publisher=publisher,
        lister=VolumeLister(stores.pool, stores.volume_records, publisher, stores.health_check),
        health_check=stores.health_check,
        capacity_report=CapacityReport(
            stores.capacity,
            stores.provisioning,
            stores.supported,
            stores.identity.segment,
        ),
        validation=Validation(
            stores.volume_records,
            stores.content_records,
            stores.supported,
            stores.provisioning,
        ),
        modifier=modifier,
        interrupted_changes=InterruptedChanges(
            stores.identity.driver, stores.running, modifier.interrupted, modifier.apply
        ),
    )


def _node_rules(
    stores: Stores, target_roots: tuple[str, ...], grow_image: ImageGrowth | None
) -> NodeRules:
    """The rules of the node part."""
    volume_records, content_records = stores.volume_records, stores.content_records
    node_state, access = stores.node_state, stores.access
    node_expand = NodeExpand(
        volume_records, content_records, node_state, access, stores.supported, grow_image
    )
    publish_check = PublishCheck(volume_records, content_records, node_state, stores.supported)
    preparation = FilesystemPreparation(content_records, access)
    host_image = HostImage(
        node_state, publish_check, stores.io_limits, preparation, stores.tool_locks
    )
    node_unpublish = NodeUnpublish(stores.pool, node_state, access, target_roots)
    node_stage = NodeStage(
        volume_records=volume_records,
        content_records=content_records,
        node_state=node_state,
        access=access,
        supported=stores.supported,
        io_limits=stores.io_limits,
        attach_slots=stores.attach_slots,
        preparation=preparation,
        tool_locks=stores.tool_locks,
        node_id=stores.identity.node_id,
    )
    node_unstage = NodeUnstage(stores.pool, node_state, access, stores.io_limits)
    return NodeRules(
        volume_records=volume_records,
        node_state=node_state,
        max_volumes=stores.attach_slots.limit,
        io_limits=stores.io_limits,
        fs_types=stores.supported.fs_types,
        node_stage=node_stage,
        node_unstage=node_unstage,
        node_publish=NodePublish(
            content_records=content_records,
            node_state=node_state,
            publish_check=publish_check,
            io_limits=stores.io_limits,
            node_expand=node_expand,
            host_image=host_image,
            target_roots=target_roots,
        ),
        deferred_publish=DeferredNodePublish(
            content_records, node_state, publish_check, stores.io_limits, host_image
        ),
        node_unpublish=node_unpublish,
        node_expand=node_expand,
        node_stats=NodeStats(
            volume_records,
            node_state,
            access,
            stores.health_check,
            tells_condition=stores.identity.tells_condition,
            running=stores.running,
        ),
        health_check=stores.health_check,
    )
