"""Composition of the controller part, and of the snapshots that it takes."""

from crust import operations
from crust.blockdriver.controller.capacity import CapacityReport
from crust.blockdriver.controller.controller_publish import ControllerPublish
from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.controller.list_volumes import Validation, VolumeLister
from crust.blockdriver.controller.modify_volume import (
    EnforcedByStorage,
    InterruptedChanges,
    VolumeModifier,
)
from crust.blockdriver.driver import Stores
from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.node import guests
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.live_volumes import LiveVolumes
from crust.blockdriver.records.attach_slots import AttachSlots
from crust.blockdriver.records.health import HealthCheck
from crust.blockdriver.records.models import GroupRecord, SnapshotRecord
from crust.blockdriver.records.records import Records
from crust.blockdriver.services.controller import ControllerRules
from crust.blockdriver.services.roles import NodeIdentity
from crust.blockdriver.services.snapshot_calls import SnapshotCalls
from crust.blockdriver.snapshots.content_source import ContentSources
from crust.blockdriver.snapshots.freeze_intents import Intents
from crust.blockdriver.snapshots.group_snapshot import GroupSnapshots
from crust.blockdriver.snapshots.guest_freeze import GuestFreezer
from crust.blockdriver.snapshots.host_freeze import LIMIT_S, Freezer
from crust.blockdriver.snapshots.recovery import SnapshotRecovery
from crust.blockdriver.snapshots.take_snapshot import VolumeSnapshots


def snapshots(
    stores: Stores, live: LiveVolumes, reachable: guests.Guests, run_dir: str
) -> tuple[SnapshotRecovery, ContentSources]:
    """What takes snapshots and copies volumes."""
    intents = Intents(run_dir)
    freezer = Freezer(intents, stores.access)
    guest_freezer = GuestFreezer(reachable, intents, limit_s=LIMIT_S)
    pool = stores.pool
    snapshot_records = Records(
        stores.engine.records(RecordKind.SNAPSHOTS),
        SnapshotRecord,
        lambda each: pool.ids.is_snapshot_id(each),
    )
    groups = Records(
        stores.engine.records(RecordKind.GROUPS),
        GroupRecord,
        lambda each: pool.ids.is_group_id(each),
    )
    volume_snapshots = VolumeSnapshots(
        pool=pool,
        volume_records=stores.volume_records,
        content_records=stores.content_records,
        snapshot_records=snapshot_records,
        groups=groups,
        provisioning=stores.provisioning,
        node=live,
        capacity=stores.capacity,
        freezer=freezer,
        guest_freezer=guest_freezer,
    )
    group_snapshots = GroupSnapshots(pool, groups, volume_snapshots)
    recovery = SnapshotRecovery(
        intents, freezer, guest_freezer, groups, volume_snapshots, group_snapshots
    )
    sources = ContentSources(
        volume_records=stores.volume_records,
        content_records=stores.content_records,
        volume_snapshots=volume_snapshots,
        provisioning=stores.provisioning,
        node=live,
        freezer=freezer,
        guest_freezer=guest_freezer,
    )
    return recovery, sources


def rules(  # noqa: PLR0913 - composition
    identity: NodeIdentity,
    stores: Stores,
    live: LiveVolumes,
    attach_slots: AttachSlots,
    io_limits: IoLimits,
    sources: ContentSources,
    health_check: HealthCheck,
    calls: SnapshotCalls,
    running: operations.KeyedOperations,
) -> ControllerRules:
    """The rules of the controller part."""
    publisher = ControllerPublish(
        stores.pool,
        stores.volume_records,
        live,
        stores.supported,
        attach_slots,
        identity.node_id,
        stores.provisioning,
    )
    in_storage = stores.engine.limits
    modifier = VolumeModifier(
        volume_records=stores.volume_records,
        provisioning=stores.provisioning,
        node=live,
        enforcement=EnforcedByStorage(in_storage) if in_storage else io_limits,
        capacity=stores.capacity,
        supported=stores.supported,
    )
    return ControllerRules(
        provisioner=Provisioner(
            pool=stores.pool,
            volume_records=stores.volume_records,
            content_records=stores.content_records,
            provisioning=stores.provisioning,
            node=live,
            sources=sources,
            capacity=stores.capacity,
            supported=stores.supported,
            segment=identity.segment,
            limits=in_storage,
        ),
        publisher=publisher,
        lister=VolumeLister(stores.pool, stores.volume_records, publisher, health_check),
        health_check=health_check,
        capacity_report=CapacityReport(
            stores.capacity, stores.provisioning, stores.supported, identity.segment
        ),
        validation=Validation(
            stores.volume_records, stores.content_records, stores.supported, stores.provisioning
        ),
        snapshots=calls,
        modifier=modifier,
        interrupted_changes=InterruptedChanges(
            identity.driver, running, modifier.interrupted, modifier.apply
        ),
    )
