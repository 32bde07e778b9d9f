"""The controller's side of the engine for Ceph RBD: one interface to images, snapshots, copies and space.

It decides nothing: each method goes to the module that has the rule. Every call blocks for as long as the cluster
takes (`crust.ceph.user.Timeouts`), and raises the errors of `crust.ceph.failures` beside those that it names.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.engines.protocol import Image, PoolSpace, Region
from crust.blockdriver.engines.rbd.intents import Intents
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.pool import OBJECT
from crust.blockdriver.engines.rbd.provisioning.background import BackgroundWork
from crust.blockdriver.engines.rbd.provisioning.copies import RbdCopies
from crust.blockdriver.engines.rbd.provisioning.ended_claims import EndedClaims
from crust.blockdriver.engines.rbd.provisioning.images import ORDER_BYTES, VolumeImages
from crust.blockdriver.engines.rbd.provisioning.lifecycle import RbdMaking, VolumeLifecycle
from crust.blockdriver.engines.rbd.provisioning.snapshots import (
    RbdSnapshots,
    RbdTaking,
    SnapshotSets,
)
from crust.blockdriver.engines.rbd.provisioning.space import CephSpace
from crust.blockdriver.engines.rbd.records import RbdContentRecords
from crust.core import errors, volumes
from crust.core.pool_ids import set_of

_log = logging.getLogger(__name__)

_MOST_OBJECTS = 256_000_000
"""What librbd keeps an object map for."""

MODES = frozenset({
    volumes.AccessMode.SINGLE_NODE_WRITER,
    volumes.AccessMode.SINGLE_NODE_READER_ONLY,
    volumes.AccessMode.SINGLE_NODE_SINGLE_WRITER,
    volumes.AccessMode.SINGLE_NODE_MULTI_WRITER,
    volumes.AccessMode.MULTI_NODE_READER_ONLY,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class RbdProvisioning:
    """The images of a pool in Ceph. Sizes are bytes; what fails is named in `crust.ceph.failures`."""

    place: Place
    lifecycle: VolumeLifecycle
    images: VolumeImages
    snapshots: RbdSnapshots
    sets: SnapshotSets
    copies: RbdCopies
    capacity: CephSpace
    background: BackgroundWork
    ended_claims: EndedClaims

    @property
    def modes(self) -> frozenset[volumes.AccessMode]:
        """One writer in the cluster, or any number of readers."""
        return MODES

    @property
    def raw_modes(self) -> frozenset[volumes.AccessMode]:
        """The same, and several writers: each has a claim, and RBD orders what they write."""
        return MODES | {volumes.AccessMode.MULTI_NODE_MULTI_WRITER}

    def open(self) -> None:
        """Settle volumes and snapshots, and begin the background work."""
        for each in self.unsettled():
            try:
                self._settle(each)
            except errors.PeerUnavailable:
                raise
            except errors.CrustError as err:
                _log.warning("an unfinished volume or set stays", extra={"id": each, "error": err})
        self.background.start()
        self.ended_claims.start()

    def stop(self) -> None:
        """End the background work."""
        self.ended_claims.stop()
        self.background.stop()

    def check(self) -> None:
        """One small read; nothing where only calls bring keys: a pod's key says nothing of this process."""
        if self.place.is_lent:
            return
        with self.place.ioctx(f"cannot reach {self.place.shown}") as ioctx:
            ioctx.stat(OBJECT)

    def check_image(self, volume_id: volumes.VolumeId) -> None:
        """By the image's mark, which whoever restores one by hand sets by hand."""
        self.images.own_size_bytes(volume_id)

    @contextmanager
    def making(self, volume_id: volumes.VolumeId) -> Iterator[RbdMaking]:
        """After an intent. Raises `CephQuotaReached`."""
        with self.lifecycle.making(volume_id) as making:
            yield making
        self.background.wake()

    def remove(self, volume_id: volumes.VolumeId) -> None:
        """To the trash, after an intent. Raises `StillAttached` while a client has the image open."""
        self.lifecycle.remove(volume_id)
        self.background.wake()

    @contextmanager
    def taking(self, set_id: str, images: Sequence[Image]) -> Iterator[RbdTaking]:
        """After an intent."""
        with self.sets.taking(set_id, images) as taking:
            yield taking
        self.background.wake()

    def remove_set(self, set_id: str, images: Sequence[Image]) -> None:
        """After an intent. Volumes that were made from it keep what they share with it."""
        self.sets.remove(set_id, images)
        self.background.wake()

    def unsettled(self) -> tuple[volumes.VolumeId, ...]:
        """By the intents."""
        return self.lifecycle.intents.ids() + self.sets.intents.ids()

    def settle(self, thing_id: volumes.VolumeId) -> None:
        """Go on after a kill."""
        self._settle(thing_id)
        self.background.wake()

    def _settle(self, thing_id: volumes.VolumeId) -> None:
        self.lifecycle.settle(thing_id)
        self.sets.settle(thing_id)

    def grow(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Grow; whoever has it open is told by librbd."""
        self.images.grow(volume_id, size_bytes)

    def maximum_bytes(self) -> int:
        """Of an image with an object map."""
        return _MOST_OBJECTS * ORDER_BYTES

    def space(self) -> PoolSpace:
        """By the managers' statistics and the quota."""
        return self.capacity.space()

    def image_ids(self) -> frozenset[volumes.VolumeId]:
        """Of one listing, and the intents after it: what was begun since is in none of both."""
        found = self.images.image_ids()
        return found.difference(self.lifecycle.intents.ids())

    def snapshot_ids(self) -> frozenset[str]:
        """By opening every image, 8 ms each, and the intents after it."""
        found, unsettled = self.snapshots.ids(), frozenset(self.sets.intents.ids())
        return frozenset(each for each in found if set_of(each) not in unsettled)

    def image_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The image's size."""
        return self.images.image_bytes(volume_id)

    def image_problem(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        """Absent, or smaller than it was created."""
        return self.images.image_problem(volume_id, size_bytes)

    def copies_at_once(self) -> bool:
        """Always: a snapshot is one operation of the cluster."""
        return True

    def copy_bytes(self, volume_id: volumes.VolumeId) -> int:
        """Snapshots and clones share what is not written."""
        return 0

    def check_snapshot(self, image: Image) -> None:
        """In the volume's image, or in one that was kept aside for it."""
        self.snapshots.check(image)

    @property
    def is_used_elsewhere(self) -> bool:
        """By the guests and kernels of all nodes."""
        return True

    def allocated(self, image: Image) -> tuple[Region, ...]:
        """Whole objects, of 4 MiB."""
        return self.snapshots.allocated(image)

    def changed(self, base: Image, target: Image) -> tuple[Region, ...]:
        """Whole objects, of 4 MiB."""
        return self.snapshots.changed(base, target)


def provisioning(place: Place, trash_keep_s: int = 0) -> RbdProvisioning:
    """The parts for `place`, without I/O; `trash_keep_s` as `VolumeImages` has it."""
    images = VolumeImages(place, trash_keep_s)
    snapshots = RbdSnapshots(place, images)
    copies = RbdCopies(place, images, snapshots)
    lifecycle = VolumeLifecycle(
        Intents(place, RecordKind.VOLUMES), RbdContentRecords(place), images, copies
    )
    return RbdProvisioning(
        place,
        lifecycle,
        images,
        snapshots,
        SnapshotSets(Intents(place, RecordKind.SNAPSHOTS), snapshots),
        copies,
        CephSpace(place),
        BackgroundWork(place, copies),
        EndedClaims(place),
    )
