"""The parts that the rules of the driver share: its pool, the records in it, and this node's attachments.

`crust.blockdriver.driver.build` composes them once. A rule takes them as one object, and names only its own parts.
"""

from dataclasses import dataclass

from crust.blockdriver.engines.pool_access import NodeAccess, PoolHome
from crust.blockdriver.engines.protocol import Engine, Provisioning
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.capacity import PoolCapacity
from crust.blockdriver.records.models import ContentRecord, SnapshotSet, VolumeRecord
from crust.blockdriver.records.node_state import AttachSlots, NodeState
from crust.blockdriver.records.records import IndexedRecords, Records
from crust.core import operations


@dataclass(frozen=True, slots=True)
class Stores:
    node_id: str
    segment: str
    """The value of this node's topology segment; empty if every node reaches the pool."""
    running: operations.KeyedOperations
    """By the id of a volume, snapshot or group: these ids differ in their prefix."""
    engine: Engine
    pool: PoolHome
    provisioning: Provisioning
    access: NodeAccess
    volume_records: IndexedRecords[VolumeRecord]
    content_records: Records[ContentRecord]
    snapshot_sets: IndexedRecords[SnapshotSet]
    node_state: NodeState
    supported: SupportedCapabilities
    capacity: PoolCapacity
    attach_slots: AttachSlots
