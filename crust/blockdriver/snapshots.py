"""What the driver has for snapshots, put together."""

import os
from dataclasses import dataclass

from crust.blockdriver import snapshot_record
from crust.blockdriver.freezes import Freezer
from crust.blockdriver.grouping import Grouper
from crust.blockdriver.origins import Origins
from crust.blockdriver.snapshot_record import GroupRecord, Shelf, SnapshotRecord
from crust.blockdriver.snapshotting import Snapshotter
from crust.blockdriver.state import State


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The parts that know snapshots."""

    freezer: Freezer
    groups: Shelf[GroupRecord]
    snapshotter: Snapshotter
    grouper: Grouper
    origins: Origins

    def open(self) -> None:
        """Thaw first: somebody waits. Then read the records and undo what was half done. After the backend."""
        self.freezer.open()
        self.groups.open()
        self.snapshotter.shelf.open()
        self.grouper.recover()
        self.snapshotter.recover()


def compose(shared: State, *, state_dir: str, run_dir: str) -> Snapshots:
    """Touches nothing."""
    freezer = Freezer(run_dir)
    shelf = Shelf(
        os.path.join(state_dir, "snapshots"), SnapshotRecord, snapshot_record.is_snapshot_id
    )
    groups = Shelf(os.path.join(state_dir, "groups"), GroupRecord, snapshot_record.is_group_id)
    snapshotter = Snapshotter(shared, shelf, freezer)
    return Snapshots(
        freezer=freezer,
        groups=groups,
        snapshotter=snapshotter,
        grouper=Grouper(shared, groups, snapshotter),
        origins=Origins(shared, snapshotter, freezer),
    )
