"""Snapshots of images, the sets that they are taken and removed in, and what differs between two.

A snapshot of a volume is a snapshot of its image, named by the snapshot's id. It takes the same time whatever the
image holds, and stays when the volume is deleted: the image is then kept aside (`images`). A snapshot with clones can
be deleted: RBD keeps it in a namespace of its own until the last clone is flattened or removed.

*Groups.* Members of RBD's own group snapshots can neither be cloned nor removed by name in Ceph 16, so a volume could
not be made from one. So the members are ordinary snapshots, taken one after the other and compared with their images
(`moved_on`). The object map says exactly whether a client has written since, because a client writes it before the
first write to an object.

*Sets.* The intent has the snapshots of a set (`intents`), and is there before the first of them. So what a crash
leaves is removed by it, and a set that is half removed is removed to its end.

    take      intent; snapshots; in one operation the record for the intent
    remove    in one operation an intent for the record; snapshots; no intent
"""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.engines.protocol import Image as Snapshot
from crust.blockdriver.engines.protocol import (
    ImageMissing,
    NoChangeTracking,
    Region,
    SnapshotMissing,
)
from crust.blockdriver.engines.rbd.intents import Intents, undone
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.provisioning import image_change
from crust.blockdriver.engines.rbd.provisioning.images import VolumeImages, hidden, user_snapshots
from crust.ceph import binding
from crust.ceph.binding import Image, Ioctx
from crust.ceph.failures import CephImageBusy, ignoring


@dataclass(frozen=True, slots=True)
class RbdSnapshots:
    """The snapshots of the images in `place`."""

    place: Place
    images: VolumeImages

    def ids(self) -> frozenset[str]:
        """By opening every image."""
        found: set[str] = set()
        with self.place.ioctx(f"cannot list {self.place.shown}") as ioctx:
            for name in self.place.names(ioctx):
                with ignoring(errno.ENOENT), self.place.image(ioctx, name) as image:
                    found.update(user_snapshots(image))
        return frozenset(found)

    def take(self, snapshot: Snapshot) -> None:
        """A snapshot of the image; one of that name has no record, and is replaced. Raises `ImageMissing`."""
        what = f"cannot take a snapshot of {snapshot.volume_id}"
        with self.place.turn(snapshot.volume_id), self.place.ioctx(what) as ioctx:
            try:
                with image_change.changing(self.place, ioctx, snapshot.volume_id) as image:
                    _remove_from(image, snapshot.snapshot_id)
                    image.create_snap(snapshot.snapshot_id)
            except binding.load().rbd.ImageNotFound as err:
                raise ImageMissing(snapshot.volume_id) from err
            except binding.load().rbd.ImageExists as err:
                # a client that has the image open, and was asked to make it, has not heard yet that it was removed
                raise CephImageBusy(what, errno.EEXIST) from err

    def moved_on(self, snapshot: Snapshot) -> bool:
        """Whether an object differs from the snapshot, by the object map."""
        with (
            self.place.ioctx(f"cannot compare {snapshot.snapshot_id}") as ioctx,
            self.place.image(ioctx, snapshot.volume_id) as image,
        ):
            return bool(_differing(image, snapshot.snapshot_id))

    def delete(self, volume_id: str, snapshot_id: str) -> None:
        """Remove the snapshot, and the image of a deleted volume with its last one."""
        with self.place.ioctx(f"cannot delete the snapshot {snapshot_id}") as ioctx:
            self.remove(ioctx, volume_id, snapshot_id)

    def remove(self, ioctx: Ioctx, volume_id: str, snapshot_id: str) -> None:
        """Remove a snapshot of the volume's image, which may be kept aside; absent is a success.

        An image that was kept for it goes also where the snapshot is gone: whoever removed it may have been killed.
        """
        with self.place.turn(volume_id):
            self._remove(ioctx, volume_id, snapshot_id)

    def _remove(self, ioctx: Ioctx, volume_id: str, snapshot_id: str) -> None:
        for name in self.images.all_of(ioctx, volume_id):
            with ignoring(errno.ENOENT):
                with self.place.image(ioctx, name) as image:
                    is_left = snapshot_id in user_snapshots(image) or hidden(image, snapshot_id)
                if is_left:
                    with image_change.changing(self.place, ioctx, name) as image:
                        _remove_from(image, snapshot_id)
            self.images.drop_deleted(ioctx, name)

    def image_of(self, ioctx: Ioctx, snapshot: Snapshot) -> str:
        """The name of the image that has the snapshot, which may be that of a deleted volume; "" if none has."""
        for name in self.images.all_of(ioctx, snapshot.volume_id):
            with ignoring(errno.ENOENT), self.place.image(ioctx, name) as image:
                if snapshot.snapshot_id in user_snapshots(image):
                    return name
        return ""

    def check(self, snapshot: Snapshot) -> None:
        """Raise `SnapshotMissing` if no image has the snapshot."""
        with self.place.ioctx(f"cannot look for the snapshot {snapshot.snapshot_id}") as ioctx:
            self._required(ioctx, snapshot)

    def allocated(self, snapshot: Snapshot) -> tuple[Region, ...]:
        """The objects that exist in the snapshot or in what it was cloned from."""
        with self.place.ioctx(f"cannot read the snapshot {snapshot.snapshot_id}") as ioctx:
            name = self._required(ioctx, snapshot)
            with self.place.image(ioctx, name) as image:
                image.set_snap(snapshot.snapshot_id)
                return _differing(image, None)

    def changed(self, base: Snapshot, target: Snapshot) -> tuple[Region, ...]:
        """The regions (offset and length in bytes, whole objects) that differ, by the object map.

        Raises `NoChangeTracking` where that cannot be told.
        """
        with self.place.ioctx(f"cannot compare {base.snapshot_id}") as ioctx:
            name, base_name = self._required(ioctx, target), self._required(ioctx, base)
            if name != base_name:
                raise NoChangeTracking(
                    "they are of two volumes that had one name, one after the other"
                )
            with self.place.image(ioctx, name) as image:
                order = user_snapshots(image)  # by age
                if order.index(base.snapshot_id) > order.index(target.snapshot_id):
                    raise NoChangeTracking("the base is younger than the target")
                image.set_snap(target.snapshot_id)
                return _differing(image, base.snapshot_id)

    def _required(self, ioctx: Ioctx, snapshot: Snapshot) -> str:
        name = self.image_of(ioctx, snapshot)
        if not name:
            raise SnapshotMissing(snapshot.snapshot_id)
        return name


@dataclass(frozen=True, slots=True)
class SnapshotSets:
    """The sets of snapshots. The caller makes one call per set at a time."""

    intents: Intents
    snapshots: RbdSnapshots

    @contextmanager
    def taking(self, set_id: str, images: Sequence[Snapshot]) -> Iterator["RbdTaking"]:
        """See `Provisioning.taking`."""
        self.settle(set_id)
        taking = RbdTaking(self, set_id, _noted(images))
        self.intents.begin(set_id, taking.note)
        with undone(set_id, taking, lambda: self.settle(set_id)):
            yield taking

    def remove(self, set_id: str, images: Sequence[Snapshot]) -> None:
        """See `Provisioning.remove_set`."""
        record = self.intents.state(set_id).record
        if record is not None:
            self.intents.begin_removal(set_id, record, _noted(images))
        self.settle(set_id)

    def settle(self, set_id: str) -> None:
        """See `Provisioning.settle`."""
        state = self.intents.state(set_id)
        noted = state.making if state.making is not None else state.removing
        if noted is None:
            return
        for line in noted.decode("ascii").splitlines():
            volume_id, _, snapshot_id = line.partition(" ")
            self.snapshots.delete(volume_id, snapshot_id)
        self.intents.end(set_id)


@dataclass(slots=True)
class RbdTaking:
    """A set that is being taken; `note` is its intent."""

    sets: SnapshotSets
    set_id: str
    note: bytes
    is_committed: bool = False

    def take(self, image: Snapshot) -> None:
        """A snapshot of RBD."""
        self.sets.snapshots.take(image)

    def moved_on(self, image: Snapshot) -> bool:
        """By the object map."""
        return self.sets.snapshots.moved_on(image)

    def commit(self, record: bytes) -> None:
        """The record."""
        self.sets.intents.commit(self.set_id, record, self.note)
        self.is_committed = True


def _noted(images: Sequence[Snapshot]) -> bytes:
    return "\n".join(f"{each.volume_id} {each.snapshot_id}" for each in images).encode()


def _remove_from(image: Image, snapshot_id: str) -> None:
    left = hidden(image, snapshot_id)
    if snapshot_id in user_snapshots(image):
        image.remove_snap(snapshot_id)
    for number in left:
        with ignoring(errno.ENOENT, errno.EBUSY):  # a clone has it still
            image.remove_snap_by_id(number)


def _differing(image: Image, since: str | None) -> tuple[Region, ...]:
    """The parts that differ from a snapshot, or from zeros; what was discarded since differs too."""
    found: list[Region] = []

    def note(offset: int, length: int, exists: bool) -> None:  # noqa: FBT001 - librbd calls it
        if exists or since is not None:
            found.append(Region(offset, length))

    image.diff_iterate(0, image.size(), since, note, include_parent=True, whole_object=True)
    return tuple(found)
