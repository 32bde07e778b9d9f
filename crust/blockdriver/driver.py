"""A composed driver: its services and its background tasks."""

import asyncio
import logging
from dataclasses import dataclass

from crust.blockdriver.controller import capacity
from crust.blockdriver.controller.settlement import Settlement
from crust.blockdriver.engines.node_access import NodeAccess
from crust.blockdriver.engines.pool_store import PoolHome
from crust.blockdriver.engines.protocol import Engine, Provisioning
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.node_state import NodeState
from crust.blockdriver.node.orphans import AttachmentGarbageCollector
from crust.blockdriver.records.attach_slots import AttachSlots
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.health import HealthCheck
from crust.blockdriver.records.models import ContentRecord, SnapshotSet, VolumeRecord
from crust.blockdriver.records.records import IndexedRecords, Records
from crust.blockdriver.services.controller import Controller, ControllerRules
from crust.blockdriver.services.identity import Identity
from crust.blockdriver.services.node import Node, NodeRules
from crust.blockdriver.services.pool_service import PoolService
from crust.blockdriver.services.roles import NodeIdentity, Role
from crust.blockdriver.services.snapshots import SnapshotCalls
from crust.blockdriver.snapshots.snapshot_sets import SnapshotSets
from crust.core import errors, metrics, operations, volumes
from crust.host.filesystems.tool_locks import ToolLocks
from crust.host.process import sysfs, workers
from crust.host.process.workers import Workers

COLLECT_PERIOD_S = 3600.0
MEASURE_PERIOD_S = 15.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stores:
    """What both parts of the driver are composed of."""

    identity: NodeIdentity
    running: operations.KeyedOperations
    pool: PoolHome
    engine: Engine
    volume_records: IndexedRecords[VolumeRecord]
    content_records: Records[ContentRecord]
    snapshot_sets: IndexedRecords[SnapshotSet]
    node_state: NodeState
    tool_locks: ToolLocks
    supported: SupportedCapabilities
    capacity: capacity.PoolCapacity
    attach_slots: AttachSlots
    io_limits: IoLimits
    health_check: HealthCheck

    @property
    def provisioning(self) -> Provisioning:
        """The engine's images."""
        return self.engine.provisioning

    @property
    def access(self) -> NodeAccess:
        """The engine's volumes on this node."""
        return self.engine.access


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver that is ready to be served, or called in process (the shim wraps `node` and `controller`)."""

    name: volumes.DriverName
    node_id: str
    role: Role
    stores: Stores
    controller_rules: ControllerRules
    node_rules: NodeRules
    snapshots: SnapshotSets
    identity: Identity
    controller: Controller
    pool: PoolService
    snapshot_calls: SnapshotCalls
    node: Node
    settlement: Settlement
    attachment_orphans: AttachmentGarbageCollector
    operations: operations.KeyedOperations
    workers: Workers
    """The threads of the engine, and of the host calls for its volumes."""

    async def finish_changes(self) -> None:
        """Finish changes of limits in guests that a killed driver had begun."""
        if self.role.has_controller:
            await self.controller_rules.interrupted_changes.finish()

    async def collect_garbage(self) -> None:
        """Remove what is left of volumes, snapshots and attachments."""
        if self.role.has_controller:
            await self.settlement.collect()
        if self.role.has_node:
            await self.attachment_orphans.collect()

    def count_snapshots(self) -> list[metrics.Sample]:
        """For the metrics, which a thread reads."""
        index = self.snapshots.records.index
        found = {each: index.get(each) for each in index.page()}
        snapshots = sum(len(each.snapshots) if each else 1 for each in found.values())
        groups = [each for each in found if self.stores.pool.ids.is_group_id(each)]
        return [(("snapshot",), snapshots), (("group",), len(groups))]

    async def keep_measuring(self) -> None:
        """Measure the pool's capacity for the metrics, until cancelled."""
        while self.role.has_controller:
            try:
                measured = await workers.run(self.stores.capacity.measured)
            except errors.CrustError:  # the pool's own health reports it
                metrics.forget_pool_bytes(self.name)
            else:
                for kind, number in measured.items():
                    metrics.pool_bytes.labels(self.name, kind).set(number)
            await asyncio.sleep(MEASURE_PERIOD_S)

    async def keep_collecting_garbage(self) -> None:
        """Collect now and every hour, until cancelled; a failure does not end it."""
        while True:
            try:
                await self.collect_garbage()
            except errors.CrustError as err:
                _log.warning("garbage collection failed", extra={"error": err})
            await asyncio.sleep(COLLECT_PERIOD_S)

    def open(self) -> None:
        """Read the state of disk and kernel, before the first RPC and when the pool is there again. Blocks.

        Raises what `PoolHome.open` does, and the error of a directory that cannot be created.
        """
        self.snapshots.freezer.thaw_mounted()
        self.stores.pool.open()
        if not self.role.has_controller:
            # no key to read the pool with, and nothing here that its records decide
            self.stores.node_state.open(sysfs.boot_id())
            return
        self.stores.provisioning.open()  # for RBD it begins work in the background
        self.stores.volume_records.open()
        is_id, images = self.stores.pool.ids.is_volume_id, self.stores.provisioning.image_ids()
        self.stores.capacity.open(each for each in images if is_id(each))
        if self.role.has_node:
            self.stores.node_state.open(sysfs.boot_id())
            self.node_rules.io_limits.recover(self.stores.volume_records)
        self.snapshots.freezer.open()
        self.snapshots.records.open()
