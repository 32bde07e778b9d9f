"""Snapshots of images, the members of a set, and the differences between two snapshots.

A snapshot of a volume is a snapshot of its image, named by the snapshot's id. It takes the same time for every image,
and stays when the volume is deleted: the image is then kept aside (`images`). A snapshot with clones can be deleted:
RBD keeps it in a namespace of its own until the last clone is flattened or removed.

*Groups.* Members of RBD's own group snapshots can neither be cloned nor removed by name in Ceph 16, so no volume
could be made from a member. So the members are ordinary snapshots, taken one after the other and compared with their
images (`moved_on`). The object map says exactly whether a client has written since, because a client changes it
before the first write to an object.

The sets are made and removed by `engine`.
"""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crust.blockdriver.ceph.binding import CephImageBusy, Image, Ioctx, ignoring, load
from crust.blockdriver.engines.pool_access import RecordKind, set_of
from crust.blockdriver.engines.protocol import Image as Snapshot
from crust.blockdriver.engines.protocol import NoChangeTracking, SnapshotMissing
from crust.blockdriver.engines.rbd.provisioning import image_use, images
from crust.blockdriver.engines.rbd.provisioning.images import VolumeImages, hidden, user_snapshots
from crust.blockdriver.engines.rbd.provisioning.snapshot_bytes import SnapshotBytes, bytes_of
from crust.blockdriver.engines.rbd.records import RbdRecords
from crust.blockdriver.host.extents import Extent


@dataclass(slots=True)
class RbdSnapshots(VolumeImages):
    snapshot_bytes: SnapshotBytes = field(init=False)

    @property
    def set_records(self) -> RbdRecords:
        """The records of sets, and the intents of unfinished ones."""
        return RbdRecords(self.place, RecordKind.SNAPSHOTS)

    def snapshot_ids(self) -> frozenset[str]:
        """By a look at every image, 8 ms each, and the intents after it."""
        names: set[str] = set()
        with self.place.ioctx(f"cannot list {self.place.shown}") as ioctx:
            for name in self.place.names(ioctx):
                with ignoring(errno.ENOENT), self.place.image(ioctx, name) as image:
                    names.update(user_snapshots(image))
        unfinished = frozenset(self.set_records.unfinished())
        return frozenset(name for name in names if set_of(name) not in unfinished)

    def remove_snapshot(self, ioctx: Ioctx, volume_id: str, snapshot_id: str) -> None:
        """Remove a snapshot of the volume's image, which may be kept aside; absent is a success.

        An image that was kept for the snapshot goes too, even without the snapshot: a removal may have been killed.
        """
        with self.place.turn(volume_id):
            for name in self.all_of(ioctx, volume_id):
                with ignoring(errno.ENOENT):
                    with self.place.image(ioctx, name) as image:
                        is_left = snapshot_id in user_snapshots(image) or hidden(image, snapshot_id)
                    if is_left:
                        with image_use.changing(self.place, ioctx, name) as image:
                            self.remove_from(image, snapshot_id)
                self.drop_deleted(ioctx, name)

    def remove_from(self, image: Image, snapshot_id: str) -> None:
        """Remove a snapshot from an image that is open for changes; absent is a success."""
        hidden_ids = hidden(image, snapshot_id)
        with self.snapshot_bytes.removal(image.id(), snapshot_id):
            if snapshot_id in user_snapshots(image):
                image.remove_snap(snapshot_id)
            for number in hidden_ids:
                with ignoring(errno.ENOENT, errno.EBUSY):  # a clone has it still
                    image.remove_snap_by_id(number)

    def image_of(self, ioctx: Ioctx, snapshot: Snapshot) -> str:
        """The name of the image with the snapshot, whose volume may be deleted. Raises `SnapshotMissing`."""
        for name in self.all_of(ioctx, snapshot.volume_id):
            with ignoring(errno.ENOENT), self.place.image(ioctx, name) as image:
                if snapshot.snapshot_id in user_snapshots(image):
                    return name
        raise SnapshotMissing(snapshot.snapshot_id)

    def check_snapshot(self, image: Snapshot) -> None:
        """Look in the volume's image, and in images that were kept aside. Raises `SnapshotMissing`."""
        with self.place.ioctx(f"cannot look for the snapshot {image.snapshot_id}") as ioctx:
            self.image_of(ioctx, image)

    def allocated(self, image: Snapshot, start: int = 0) -> tuple[Extent, ...]:
        """The objects, of 4 MiB, that exist in the snapshot or in the images that it was cloned from."""
        with (
            self.place.ioctx(f"cannot read the snapshot {image.snapshot_id}") as ioctx,
            self.place.image(ioctx, self.image_of(ioctx, image)) as opened,
        ):
            opened.set_snap(image.snapshot_id)
            return images.differing(opened, None, start)

    def changed(self, base: Snapshot, target: Snapshot, start: int = 0) -> tuple[Extent, ...]:
        """The objects, of 4 MiB, that differ, by the object map; raises `NoChangeTracking` if that is unknown."""
        with self.place.ioctx(f"cannot compare {base.snapshot_id}") as ioctx:
            name, base_name = self.image_of(ioctx, target), self.image_of(ioctx, base)
            if name != base_name:
                raise NoChangeTracking(
                    "they are of two volumes that had one name, one after the other"
                )
            with self.place.image(ioctx, name) as image:
                order = user_snapshots(image)  # by age
                if order.index(base.snapshot_id) > order.index(target.snapshot_id):
                    raise NoChangeTracking("the base is younger than the target")
                image.set_snap(target.snapshot_id)
                return images.differing(image, base.snapshot_id, start)


@dataclass(slots=True)
class NewRbdSnapshotSet:
    """A set that is being taken; `note` is its intent."""

    snapshots: RbdSnapshots
    set_id: str
    note: bytes
    is_committed: bool = False

    def take(self, image: Snapshot) -> None:
        """Take a snapshot; it replaces one of that name, which has no record. Raises `ImageMissing`."""
        place, volume_id = self.snapshots.place, image.volume_id
        error_text = f"cannot take a snapshot of {volume_id}"
        with place.turn(volume_id), place.volume(volume_id, error_text) as ioctx:
            try:
                with image_use.changing(place, ioctx, volume_id) as opened:
                    self.snapshots.snapshot_bytes.taken(self.set_id, opened.id())
                    self.snapshots.remove_from(opened, image.snapshot_id)
                    opened.create_snap(image.snapshot_id)
            except load().rbd.ImageExists as err:
                # the client that has the image open must make it, and does not know yet that it was removed
                raise CephImageBusy(error_text, errno.EEXIST) from err

    def added_bytes(self) -> int:
        place = self.snapshots.place
        added_bytes = 0
        with place.ioctx(f"cannot count the blocks of {self.set_id}") as ioctx:
            for volume_id, snapshot_id in snapshots_of(self.note):
                with place.image(ioctx, volume_id) as image:
                    added_bytes += bytes_of(ioctx, image, snapshot_id.__eq__)
        return added_bytes

    def moved_on(self, image: Snapshot) -> bool:
        """Whether an object differs from the snapshot, by the object map."""
        place = self.snapshots.place
        with (
            place.ioctx(f"cannot compare {image.snapshot_id}") as ioctx,
            place.image(ioctx, image.volume_id) as opened,
        ):
            return bool(images.differing(opened, image.snapshot_id))

    def commit(self, records: Mapping[RecordKind, bytes]) -> None:
        self.snapshots.set_records.commit(self.set_id, records[RecordKind.SNAPSHOTS], self.note)
        self.is_committed = True


def noted(images: Sequence[Snapshot]) -> bytes:
    """The note of a set's intent; `snapshots_of` reads it."""
    return "\n".join(f"{image.volume_id} {image.snapshot_id}" for image in images).encode()


def snapshots_of(note: bytes) -> list[tuple[str, str]]:
    """The snapshots of a set, each with its volume."""
    lines = (line.partition(" ") for line in note.decode("ascii").splitlines())
    return [(volume_id, snapshot_id) for volume_id, _, snapshot_id in lines]
