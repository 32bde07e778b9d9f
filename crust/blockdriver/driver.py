"""A driver: its parts composed, its services, and its background work. The only file that knows both of its parts."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from crust.blockdriver import guests, settings
from crust.blockdriver.controller import create_volume, list_volumes, topology
from crust.blockdriver.controller.modify_volume import EnforcedByStorage, VolumeModifier
from crust.blockdriver.engines.pool_access import RecordKind
from crust.blockdriver.engines.protocol import Engine
from crust.blockdriver.host import throttling
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.node_expand import NodeExpand
from crust.blockdriver.node.node_stage import FilesystemPreparation, NodeStage
from crust.blockdriver.node.node_stats import NodeStats
from crust.blockdriver.node.node_unpublish import NodeUnpublish, NodeUnstage
from crust.blockdriver.node.publish.deferred_publish import DeferredNodePublish
from crust.blockdriver.node.publish.host_image import HostImage
from crust.blockdriver.node.publish.node_publish import NodePublish
from crust.blockdriver.records import health, models, node_state
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.capacity import PoolCapacity
from crust.blockdriver.records.models import ContentRecord, SnapshotSet, VolumeRecord
from crust.blockdriver.records.records import IndexedRecords, Records
from crust.blockdriver.records.stores import Stores
from crust.blockdriver.services.calls import Calls
from crust.blockdriver.services.controller import Controller
from crust.blockdriver.services.identity import Identity
from crust.blockdriver.services.node import Node
from crust.blockdriver.services.roles import NODE_ID_MAX_BYTES, Role
from crust.blockdriver.snapshots.content_source import ContentSources
from crust.blockdriver.snapshots.freezer import Freezer
from crust.blockdriver.snapshots.host_freeze import Intents
from crust.blockdriver.snapshots.snapshot_sets import SnapshotSets
from crust.core import errors, metrics, operations, volumes
from crust.core.settings import OWN_DRIVER
from crust.host.files.locks import ToolLocks
from crust.host.filesystems import mkfs
from crust.host.process import syscalls, workers
from crust.host.process.workers import Workers
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2

COLLECT_PERIOD_S = 3600.0
EXAMINE_PERIOD_S = 60.0
_EXAMINE_PAUSE = 20
"""A pause is as long as so many looks."""
MEASURE_PERIOD_S = 15.0

_ALL = Role()
_log = logging.getLogger(__name__)


def build(  # noqa: PLR0913 - one per setting
    *,
    engine: Engine,
    run_dir: str,
    node_id: str,
    name: str = OWN_DRIVER,
    target_roots: tuple[str, ...] = ("/var/lib/kubelet",),
    overcommit: float = 1.0,
    pool_low_percent: int = settings.DEFAULT_POOL_LOW_PERCENT,
    thick: bool = False,
    reserve_snapshots: bool = True,
    max_snapshots_per_volume: int = settings.DEFAULT_MAX_SNAPSHOTS_PER_VOLUME,
    attach_slots: node_state.AttachSlots | None = None,
    runtime_guests: guests.Guests | None = None,
    throttle: throttling.Throttle | None = None,
    io_cgroup: str = "",
    threads: Workers | None = None,
    role: Role = _ALL,
    pool_name: str = settings.DEFAULT_POOL,
) -> "Driver":
    """Compose the driver of one pool, without I/O.

    `runtime_guests` reaches guests that have deferred volumes; without it no call reaches them. `role` decides which
    RPCs the driver serves. `attach_slots` are those of the node, for all pools.
    """
    csi.required(node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
    shown = name if pool_name == settings.DEFAULT_POOL else f"{name}/{pool_name}"
    threads = threads or Workers(f"the driver {shown}")
    pool, provisioning, records = engine.home, engine.provisioning, engine.records
    volume_records = IndexedRecords(
        records(RecordKind.VOLUMES), VolumeRecord, lambda text: pool.ids.is_volume_id(text)
    )
    index = volume_records.index
    attach_slots = attach_slots or node_state.AttachSlots(node_id, settings.DEFAULT_MAX_VOLUMES)
    attach_slots.pools.append((index, engine.access))
    stores = Stores(
        node_id=node_id,
        segment="" if role.is_shared else topology.value_of(node_id),
        running=operations.KeyedOperations(threads),
        engine=engine,
        pool=pool,
        provisioning=provisioning,
        access=engine.access,
        volume_records=volume_records,
        content_records=Records(
            records(RecordKind.CONTENT), ContentRecord, lambda text: pool.ids.is_volume_id(text)
        ),
        snapshot_sets=IndexedRecords(
            records(RecordKind.SNAPSHOTS), SnapshotSet, lambda text: pool.ids.is_set_id(text)
        ),
        node_state=node_state.NodeState(run_dir, engine.access),
        supported=SupportedCapabilities(provisioning.modes, provisioning.raw_modes, mkfs.SUPPORTED),
        capacity=PoolCapacity(index, provisioning, overcommit, pool_low_percent, reserve_snapshots),
        attach_slots=attach_slots,
    )
    reachable = runtime_guests or guests.Guests()
    health_check, segment = health.HealthCheck(stores), stores.segment
    places = (csi_pb2.Topology(segments={topology.KEY: segment}),) if segment else ()
    calls = Calls(stores.running, places)
    io_limits = IoLimits(stores, throttle or throttling.Throttle(io_cgroup), reachable)
    freezer = Freezer(Intents(run_dir), engine.access, reachable)
    snapshots = SnapshotSets(stores, freezer, max_snapshots_per_volume)
    modifier = VolumeModifier(
        stores, EnforcedByStorage(engine.set_limits) if engine.set_limits else io_limits
    )
    controller = Controller(
        role=role,
        stores=stores,
        snapshots=snapshots,
        calls=calls,
        provisioner=create_volume.Provisioner(stores, ContentSources(stores, snapshots), thick),
        lister=list_volumes.VolumeLister(stores, health_check),
        health_check=health_check,
        modifier=modifier,
    )
    tool_locks = ToolLocks(engine.tool_locks or Path(run_dir) / "tools.lock")
    preparation = FilesystemPreparation(stores, tool_locks)
    host_image = HostImage(stores, io_limits, preparation)
    node_expand = NodeExpand(stores, modifier.grow_image if role.node_deployment else None)
    node = Node(
        role=role,
        stores=stores,
        io_limits=io_limits,
        node_stage=NodeStage(stores, io_limits, preparation, target_roots),
        node_unstage=NodeUnstage(stores, io_limits),
        node_publish=NodePublish(stores, io_limits, node_expand, host_image, target_roots),
        deferred_publish=DeferredNodePublish(stores, io_limits, host_image),
        node_unpublish=NodeUnpublish(stores, target_roots),
        node_expand=node_expand,
        node_stats=NodeStats(stores, health_check, role.csi_profile == "1.12"),
        health_check=health_check,
        calls=calls,
    )
    return Driver(
        name=volumes.DriverName(name),
        shown=shown,
        role=role,
        stores=stores,
        identity=Identity(name, provisioning, role, stores.running),
        controller=controller,
        node=node,
        workers=threads,
        pool_name=pool_name,
    )


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver of one pool, ready to be served, or called in process (the shim wraps `node` and `controller`).

    `further` are the drivers of the other pools under the same name, by the pools' names.
    """

    name: volumes.DriverName
    shown: str
    """Its pool, for health, metrics and logs; the default pool has the driver's name alone."""
    role: Role
    stores: Stores
    identity: Identity
    controller: Controller
    node: Node
    workers: Workers
    """The threads of the engine, and of the host calls for its volumes."""
    pool_name: str = settings.DEFAULT_POOL
    further: Mapping[str, "Driver"] = field(default_factory=dict)

    async def collect_garbage(self) -> None:
        if self.role.has_controller:
            await self.controller.provisioner.settle()
        if self.role.has_node:
            await self.node.node_unstage.collect()

    def count_snapshots(self) -> list[metrics.Sample]:
        """The numbers of snapshots and groups, for the metrics, which a thread reads."""
        index = self.stores.snapshot_sets.index
        summaries = {set_id: index.get(set_id) for set_id in index.page()}
        snapshots = sum(len(summary.snapshots) if summary else 1 for summary in summaries.values())
        groups = [set_id for set_id in summaries if self.stores.pool.ids.is_group_id(set_id)]
        return [(("snapshot",), snapshots), (("group",), len(groups))]

    async def keep_measuring(self) -> None:
        """Measure the pool's capacity for the metrics, until cancelled."""
        while True:
            try:
                measured = await workers.run(self.stores.capacity.measured)
            except errors.CrustError:  # the pool's own health reports it
                metrics.forget_pool(self.shown)
            else:
                for kind, number in measured.items():
                    metrics.pool_bytes.labels(self.shown, kind).set(number)
            await asyncio.sleep(MEASURE_PERIOD_S)

    async def keep_examining(self) -> None:
        """Look at the health of every volume for the metrics, until cancelled; in Ceph each one is a question."""
        while True:
            began_s = time.monotonic()
            try:
                metrics.show_abnormal(self.shown, await workers.run(self.count_abnormal))
            except errors.CrustError:  # the pool's own health reports it
                metrics.forget_pool(self.shown)
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(EXAMINE_PERIOD_S, _EXAMINE_PAUSE * took_s))

    def count_abnormal(self) -> Counter[str]:
        """The number of volumes that are not healthy, by the reason. Blocks."""
        check, reasons = self.node.health_check, Counter[str]()
        for volume_id in check.ids():
            with suppress(models.VolumeNotFound):  # it was deleted since
                reasons.update(finding.reason for finding in check.examine(volume_id).findings)
        return reasons

    async def keep_collecting_garbage(self) -> None:
        """Collect now and every hour, until cancelled; a failure does not end it."""
        while True:
            try:
                await self.collect_garbage()
            except errors.CrustError as err:
                _log.warning("garbage collection failed", extra={"error": err})
            await asyncio.sleep(COLLECT_PERIOD_S)

    def open(self) -> None:
        """Read the state of disk and kernel, before the first RPC and when the pool is back. Blocks.

        Raises the errors of `PoolHome.open`, and the error of a directory that cannot be created.
        """
        self.controller.snapshots.freezer.open(is_mounted=True)
        self.stores.pool.open()
        if self.role.has_node:
            self.node.io_limits.throttle.look()
        if not self.role.has_controller:
            # a node has no key for the pool's records, and needs none of them
            self.stores.node_state.open(syscalls.boot_id())
            return
        self.stores.provisioning.open()  # for RBD it begins work in the background
        self.stores.volume_records.open()
        is_id, images = self.stores.pool.ids.is_volume_id, self.stores.provisioning.image_ids()
        self.stores.capacity.open(image for image in images if is_id(image))
        if self.role.has_node:
            self.stores.node_state.open(syscalls.boot_id())
            self.node.io_limits.recover()
        self.controller.snapshots.freezer.open()
        self.stores.snapshot_sets.open()
