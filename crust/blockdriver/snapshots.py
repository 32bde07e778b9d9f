"""What the driver has for snapshots, put together."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from crust.blockdriver import capacity, snapshot_health, snapshot_record
from crust.blockdriver.backends.protocol import Backend
from crust.blockdriver.freeze_intents import Intents
from crust.blockdriver.freezes import LIMIT_S, Freezer
from crust.blockdriver.grouping import Grouper
from crust.blockdriver.guest_freezes import GuestFreezer
from crust.blockdriver.health import PoolFinding
from crust.blockdriver.origins import Origins
from crust.blockdriver.snapshot_record import GroupRecord, Shelf, SnapshotRecord
from crust.blockdriver.snapshotting import Snapshotter
from crust.blockdriver.state import State


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The parts that know snapshots."""

    intents: Intents
    freezer: Freezer
    guest_freezer: GuestFreezer
    groups: Shelf[GroupRecord]
    snapshotter: Snapshotter
    grouper: Grouper
    origins: Origins
    backend: Backend

    def troubles(self) -> Iterator[PoolFinding]:
        """What is wrong with snapshots and groups. Blocks."""
        return snapshot_health.troubles(self.snapshotter.shelf, self.groups, self.backend)

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
        self.snapshotter.shelf.open()
        self.grouper.recover()
        self.snapshotter.recover()


def compose(shared: State, room: capacity.Room, *, state_dir: str, run_dir: str) -> Snapshots:
    """Touches nothing."""
    intents = Intents(run_dir)
    freezer = Freezer(intents, shared.backend)
    guest_freezer = GuestFreezer(shared.guests, intents, limit_s=LIMIT_S)
    shelf = Shelf(
        os.path.join(state_dir, "snapshots"), SnapshotRecord, snapshot_record.is_snapshot_id
    )
    groups = Shelf(os.path.join(state_dir, "groups"), GroupRecord, snapshot_record.is_group_id)
    snapshotter = Snapshotter(shared, shelf, room, freezer, guest_freezer)
    return Snapshots(
        intents=intents,
        freezer=freezer,
        guest_freezer=guest_freezer,
        groups=groups,
        snapshotter=snapshotter,
        grouper=Grouper(shared, groups, snapshotter),
        origins=Origins(shared, snapshotter, freezer, guest_freezer),
        backend=shared.backend,
    )
