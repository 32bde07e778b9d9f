"""A table of targets with a handoff directory, without a process."""

from dataclasses import dataclass, field
from typing import Any

from crust.core.operations import KeyedOperations
from crust.core.supervised import Health
from crust.handoff.store import Store
from crust.host.process.workers import Workers
from crust.proxy.look import Reconciler
from crust.proxy.table import Entries, Events, Table
from tests.support.nodes.fake_filesystems import FakeFilesystems
from tests.support.nodes.fake_targets import FakeDevices, FakeTargets
from tests.support.nodes.places import Places


@dataclass
class Bench:
    """What looks and publishes have in common."""

    store: Store
    targets: FakeTargets
    filesystems: FakeFilesystems
    table: Table = field(default_factory=Table)
    events: Events = field(default_factory=Events)
    devices: Any = field(default_factory=FakeDevices)
    operations: KeyedOperations = field(
        default_factory=lambda: KeyedOperations(Workers("the test"))
    )

    @classmethod
    def make(cls, places: Places) -> "Bench":
        store = Store(places.volumes)
        store.open()
        return cls(store, FakeTargets(places.kubelet), FakeFilesystems(places.run))

    @property
    def entries(self) -> Entries:
        return Entries(
            self.store,
            self.table,
            self.targets,
            self.filesystems,
            self.devices,
            self.operations,
            self.events,
            Health(),
        )

    def reconciler(self) -> Reconciler:
        """A new one, which has seen nothing."""
        return Reconciler(self.entries)
