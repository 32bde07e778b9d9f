"""What a start undoes of copies that a killed driver was making: freezes first, incomplete snapshots last."""

from dataclasses import dataclass

from crust.blockdriver.records.models import GroupRecord
from crust.blockdriver.records.records import Records
from crust.blockdriver.snapshots.freeze_intents import Intents
from crust.blockdriver.snapshots.group_snapshot import GroupSnapshots
from crust.blockdriver.snapshots.guest_freeze import GuestFreezer
from crust.blockdriver.snapshots.host_freeze import Freezer
from crust.blockdriver.snapshots.take_snapshot import VolumeSnapshots


@dataclass(frozen=True, slots=True)
class SnapshotRecovery:
    """Called once, before the first RPC is served. Blocks."""

    intents: Intents
    freezer: Freezer
    guest_freezer: GuestFreezer
    groups: Records[GroupRecord]
    volume_snapshots: VolumeSnapshots
    group_snapshots: GroupSnapshots

    def thaw(self) -> None:
        """Before everything else: writers wait, and a later step may keep the driver from starting."""
        for left in self.intents.open():
            if not left.target:
                self.freezer.thaw_mounted(left)

    def open(self) -> None:
        """Thaw what only the engine finds, then read the records. After the engine opened.

        What is frozen in guests is thawed by `guest_freezer.recover`, which needs the proxy and may have to wait.
        """
        for left in self.intents.open():
            if left.target:
                self.guest_freezer.remember(left)
            else:
                self.freezer.thaw_unmounted(left)
        self.groups.open()
        self.volume_snapshots.snapshot_records.open()

    def discard_incomplete(self) -> None:
        """Undo all incomplete work."""
        self.group_snapshots.recover()
        self.volume_snapshots.recover()
