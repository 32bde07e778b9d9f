"""What the driver has for snapshots, put together."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from crust.blockdriver.controller import capacity
from crust.blockdriver.engines.protocol import Backend
from crust.blockdriver.node.state import State
from crust.blockdriver.records import snapshot_record
from crust.blockdriver.records.health import PoolFinding
from crust.blockdriver.records.snapshot_record import GroupRecord, SnapshotRecord, SnapshotRecords
from crust.blockdriver.snapshots import health
from crust.blockdriver.snapshots.content_source import ContentSources
from crust.blockdriver.snapshots.freeze_intents import Intents
from crust.blockdriver.snapshots.group_snapshot import GroupSnapshots
from crust.blockdriver.snapshots.guest_freeze import GuestFreezer
from crust.blockdriver.snapshots.host_freeze import LIMIT_S, Freezer
from crust.blockdriver.snapshots.take_snapshot import VolumeSnapshots


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The parts that know snapshots."""

    intents: Intents
    freezer: Freezer
    guest_freezer: GuestFreezer
    groups: SnapshotRecords[GroupRecord]
    volume_snapshots: VolumeSnapshots
    group_snapshots: GroupSnapshots
    content_sources: ContentSources
    backend: Backend

    def snapshot_findings(self) -> Iterator[PoolFinding]:
        """What is wrong with snapshots and groups. Blocks."""
        return health.snapshot_findings(
            self.volume_snapshots.snapshot_records, self.groups, self.backend
        )

    def thaw(self) -> None:
        """Before all else, because somebody waits, and what is read later can keep the driver from starting."""
        for left in self.intents.open():
            if not left.target:
                self.freezer.thaw_mounted(left)

    def open(self) -> None:
        """Thaw what only the backend finds, then read the records and undo what was half done. After the backend.

        What is frozen in guests is thawed by `guest_freezer.recover`, which needs the proxy and may have to wait.
        """
        for left in self.intents.open():
            if left.target:
                self.guest_freezer.remember(left)
            else:
                self.freezer.thaw_unmounted(left)
        self.groups.open()
        self.volume_snapshots.snapshot_records.open()
        self.group_snapshots.recover()
        self.volume_snapshots.recover()


def compose(
    shared: State, room: capacity.PoolCapacity, *, state_dir: str, run_dir: str
) -> Snapshots:
    """Touches nothing."""
    intents = Intents(run_dir)
    freezer = Freezer(intents, shared.backend)
    guest_freezer = GuestFreezer(shared.guests, intents, limit_s=LIMIT_S)
    snapshot_records = SnapshotRecords(
        os.path.join(state_dir, "snapshots"), SnapshotRecord, snapshot_record.is_snapshot_id
    )
    groups = SnapshotRecords(
        os.path.join(state_dir, "groups"), GroupRecord, snapshot_record.is_group_id
    )
    volume_snapshots = VolumeSnapshots(shared, snapshot_records, room, freezer, guest_freezer)
    return Snapshots(
        intents=intents,
        freezer=freezer,
        guest_freezer=guest_freezer,
        groups=groups,
        volume_snapshots=volume_snapshots,
        group_snapshots=GroupSnapshots(shared, groups, volume_snapshots),
        content_sources=ContentSources(shared, volume_snapshots, freezer, guest_freezer),
        backend=shared.backend,
    )
