"""Images of volumes by librbd: make, grow, look at, delete.

The image of a volume has the volume's id as its name. A complete image has a mark in its metadata:

    crust.volume     the volume's id, set last: an image without it is half made, or another program's

The driver makes a new image, and never takes one over. It removes an image without the mark only if nobody can have
data in it: it is empty, or a copy that was begun. It refuses any other image (`ForeignImage`) and does not touch it.
An image that a person has restored by hand has no mark either, and the person sets it.

A deletion takes the time of the data, so an image goes to RBD's trash, at once, and the background work removes it
after `trash_keep_s`. An image with existing snapshots keeps them: it is renamed to `deleted.<id>.<image id>`, the
volume's id is free, and the image goes with its last snapshot.
"""

import errno
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from crust.blockdriver.ceph.binding import Image, Ioctx, ignoring, load
from crust.blockdriver.engines.pool_access import RecordKind
from crust.blockdriver.engines.protocol import ForeignImage, ImageMissing
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.provisioning import image_use, librbd_objects
from crust.blockdriver.engines.rbd.records import RbdRecords
from crust.blockdriver.host.extents import Extent
from crust.core import volumes

MARK = "crust.volume"
DELETED = "deleted."
OBJECT_MAP = ("OBJECT_MAP", "FAST_DIFF")
FEATURES = ("LAYERING", "EXCLUSIVE_LOCK", *OBJECT_MAP, "DEEP_FLATTEN")
"""Of every image: clones, an object map for differences and its speed, and deep flattening."""
_LIMITS = {
    "rbd_qos_read_iops_limit": "read_iops",
    "rbd_qos_write_iops_limit": "write_iops",
    "rbd_qos_read_bps_limit": "read_bytes_per_second",
    "rbd_qos_write_bps_limit": "write_bytes_per_second",
}


@dataclass(slots=True)
class VolumeImages:
    place: Namespace
    trash_keep_s: int = 0
    """The time for which the trash keeps an image, for `rbd trash restore`."""

    @property
    def volume_records(self) -> RbdRecords:
        """The records of volumes, and the intents of unfinished ones."""
        return RbdRecords(self.place, RecordKind.VOLUMES)

    def grow(self, volume_id: volumes.VolumeId, size_bytes: int, *, thick: bool = False) -> None:
        """Grow the image to `size_bytes`, never shrink it; librbd notifies its clients. Raises `ImageMissing`."""
        error_text = f"cannot grow the image of {volume_id}"
        with self.place.turn(volume_id), self.place.volume(volume_id, error_text) as ioctx:
            with self.place.image(ioctx, volume_id) as image:
                if image.size() >= size_bytes:
                    return
            with image_use.changing(self.place, ioctx, volume_id) as image:
                enlarge(image, size_bytes)

    def set_limits(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """Set all limits, as the configuration of the image: each client that opens it through librbd enforces them,
        also after a change. librbd limits each client, and an image has one writer. 0 is no limit.

        Raises `ImageMissing`, RbdClientSilent.
        """
        with (
            self.place.volume(volume_id, f"cannot limit the I/O of {volume_id}") as ioctx,
            image_use.changing(self.place, ioctx, volume_id) as image,
        ):
            for key, name in _LIMITS.items():
                if limit := getattr(limits, name):
                    image.config_set(key, str(limit))
                else:
                    with suppress(KeyError):  # no such key
                        image.config_remove(key)

    def delete_image(self, volume_id: volumes.VolumeId) -> None:
        """Move the image to the trash, or aside while it has snapshots; raises `StillAttached`, `ForeignImage`."""
        error_text = f"cannot delete the image of {volume_id}"
        with self.place.turn(volume_id), self.place.ioctx(error_text) as ioctx:
            if not self.place.has_image(ioctx, volume_id):
                librbd_objects.forget_removed(ioctx, volume_id)
                image_use.forget_deletion(ioctx, volume_id)
                return
            try:
                self.check_own(ioctx, volume_id)
                with image_use.deleting(self.place, ioctx, volume_id):
                    with self.place.image(ioctx, volume_id) as image:
                        image_id, kept = image.id(), user_snapshots(image)
                    aside = f"{DELETED}{volume_id}.{image_id}"
                    if librbd_objects.finish_renaming(ioctx, image_id, volume_id, aside):
                        self.drop_deleted(ioctx, aside)
                    elif kept:
                        load().images.rename(ioctx, volume_id, aside)
                    else:
                        load().images.trash_move(ioctx, volume_id, self.trash_keep_s)
            except load().rbd.ImageNotFound:
                # an id without a header: a create was killed within librbd
                with ignoring(errno.ENOENT):
                    load().images.remove(ioctx, volume_id)

    def check_own(self, ioctx: Ioctx, volume_id: str) -> None:
        """Raise `ForeignImage` if another program may have data in the image."""
        with self.place.image(ioctx, volume_id) as image:
            # nobody can have data in a clone without the mark, or in an image that was never written
            is_ours = is_marked(image, volume_id) or parent(image) != "" or is_blank(image)
            if not is_ours:
                raise ForeignImage(volume_id, self.place.shown, "deleted")

    def drop_deleted(self, ioctx: Ioctx, name: str) -> None:
        """Move an image of a deleted volume to the trash, if its last snapshot is gone."""
        if not name.startswith(DELETED):
            return
        with ignoring(errno.ENOENT):
            with self.place.image(ioctx, name) as image:
                kept = user_snapshots(image)
            if not kept:
                load().images.trash_move(ioctx, name, self.trash_keep_s)

    def all_of(self, ioctx: Ioctx, volume_id: str) -> list[str]:
        """The image of the volume, and images of deleted volumes of that id whose snapshots exist."""
        names = [volume_id] if self.place.has_image(ioctx, volume_id) else []
        prefix = f"{DELETED}{volume_id}."
        return names + [name for name in self.place.names(ioctx) if name.startswith(prefix)]

    def image_ids(self) -> frozenset[volumes.VolumeId]:
        """The names of all images but those of deleted and of unfinished volumes.

        The intents are read after the images: a volume that was begun since is in neither list.
        """
        with self.place.ioctx(f"cannot list {self.place.shown}") as ioctx:
            names = self.place.names(ioctx)
        present = (volumes.VolumeId(name) for name in names if not name.startswith(DELETED))
        return frozenset(present).difference(self.volume_records.unfinished())

    def image_bytes(self, volume_id: volumes.VolumeId) -> int:
        with (
            self.place.ioctx(f"cannot look at {volume_id}") as ioctx,
            ignoring(errno.ENOENT),
            self.place.image(ioctx, volume_id) as image,
        ):
            return image.size()
        return 0

    def check_image(self, volume_id: volumes.VolumeId) -> None:
        """By the image's mark, which a person who restores an image sets by hand."""
        self.own_size_bytes(volume_id)

    def own_size_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The size of the image, if its mark is the volume's. Raises `ImageMissing`, `ForeignImage`."""
        with self.place.ioctx(f"cannot look at the image of {volume_id}") as ioctx:
            header = librbd_objects.read_header(ioctx, volume_id, MARK)
        if header is None:
            raise ImageMissing(volume_id)
        size_bytes, marked_for = header
        if marked_for != volume_id:
            raise ForeignImage(volume_id, self.place.shown)
        return size_bytes

    def is_empty(self, volume_id: volumes.VolumeId) -> bool:
        """Whether neither the image nor its parents have an object. Raises `ImageMissing`."""
        with (
            self.place.volume(volume_id, f"cannot look at the image of {volume_id}") as ioctx,
            self.place.image(ioctx, volume_id) as image,
        ):
            return is_blank(image)

    def image_problem(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        """The problem of an image with another mark, or a smaller size than the volume's. Raises `ImageMissing`."""
        try:
            present_bytes = self.own_size_bytes(volume_id)
        except ForeignImage as err:
            return str(err)
        if present_bytes < size_bytes:
            return f"the image has {present_bytes} bytes and should have {size_bytes}"
        return ""


def enlarge(image: Image, size_bytes: int) -> None:
    """Grow the image to the size, if it is smaller. librbd compares the sizes too: another client may have grown it
    since, and written data there.
    """
    if image.size() < size_bytes:
        image.resize(size_bytes, allow_shrink=False)


def features(names: tuple[str, ...] = FEATURES) -> int:
    rbd = load().rbd
    return sum(int(getattr(rbd, f"RBD_FEATURE_{name}")) for name in names)


def is_marked(image: Image, volume_id: str) -> bool:
    """Whether the image has the mark of this volume, so it is complete; a begun copy has the mark of its source."""
    return dict(image.metadata_list()).get(MARK) == volume_id


def volume_of(name: str) -> str:
    """The id of the volume, deleted or not, by the name of its image."""
    if not name.startswith(DELETED):
        return name
    return name.removeprefix(DELETED).rpartition(".")[0]


def parent(image: Image) -> str:
    """The name of the image's parent; empty if the image is no clone."""
    with suppress(load().rbd.ImageNotFound):
        return str(image.get_parent_image_spec()["image_name"])
    return ""


def is_blank(image: Image) -> bool:
    """Whether no object of the image exists, by its object map or by a look: no byte of it was ever written."""
    return not differing(image, None)


def differing(image: Image, since: str | None, start: int = 0) -> tuple[Extent, ...]:
    """The parts that differ from a snapshot, or from zeros, from the byte `start` on; discarded parts differ too."""
    length = image.size() - start
    parts = [Extent(start, length)] if length > 0 else []
    return tuple(written(image, parts, since, whole_and_parents=True))


def own_objects(image: Image) -> list[Extent]:
    """The parts of the image whose objects exist, without those of its parent; adjacent ones are one part."""
    parts: list[Extent] = []

    def note(offset: int, length: int, exists: bool) -> None:  # noqa: FBT001 - librbd calls it
        if not exists:
            return
        if parts and parts[-1].end == offset:
            offset, length = parts[-1].offset, parts.pop().length + length
        parts.append(Extent(offset, length))

    image.diff_iterate(0, image.size(), None, note, include_parent=False, whole_object=True)
    return parts


def written(
    image: Image,
    parts: Iterable[Extent],
    since: str | None = None,
    *,
    whole_and_parents: bool = False,
) -> list[Extent]:
    """The bytes of these parts in the image's own objects, or written or discarded since a snapshot. In order. With
    `whole_and_parents` each object counts as a whole, and those of the image's parents too.
    """
    found: list[Extent] = []

    def note(offset: int, length: int, exists: bool) -> None:  # noqa: FBT001 - librbd calls it
        if exists or since is not None:
            found.append(Extent(offset, length))

    for part in parts:
        image.diff_iterate(
            part.offset,
            part.length,
            since,
            note,
            include_parent=whole_and_parents,
            whole_object=whole_and_parents,
        )
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Snap:
    """A snapshot of an image: the cluster's number, its name, and whether it is not deleted."""

    number: int
    name: str
    is_kept: bool


def snaps(image: Image) -> list[Snap]:
    """All snapshots by age, also the deleted ones that clones still read."""
    kind = load().rbd.RBD_SNAP_NAMESPACE_TYPE_USER
    found = (
        Snap(int(snap["id"]), str(snap["name"]), snap["namespace"] == kind)
        for snap in image.list_snaps()
    )
    return sorted(found, key=lambda snap: snap.number)


def show(image: Image, snap: Snap | None) -> None:
    """Look at a snapshot of the image from now on, or at the image itself."""
    if snap is None:
        image.set_snap(None)
    else:
        image.set_snap_by_id(snap.number)


def user_snapshots(image: Image) -> list[str]:
    """The names of the snapshots that were not deleted, by age."""
    return [snap.name for snap in snaps(image) if snap.is_kept]


def hidden(image: Image, snapshot: str) -> list[int]:
    """The numbers of the deleted snapshots of that name that clones still read.

    librbd hides a snapshot first, and then removes it: a killed client leaves a hidden snapshot without clones.
    """
    kind = load().rbd.RBD_SNAP_NAMESPACE_TYPE_TRASH
    snaps = (snap for snap in image.list_snaps() if snap["namespace"] == kind)
    return [int(snap["id"]) for snap in snaps if snap["trash"]["original_name"] == snapshot]
