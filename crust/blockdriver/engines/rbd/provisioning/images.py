"""Images of volumes by librbd: make, grow, delete, and what is known of them.

The image of a volume is named by the volume's id. When it is complete it says so in its metadata:

    crust.volume     the volume's id, set last: an image without it is half made, or somebody else's

An image is made where none is, and never taken over. One without the mark is removed only if nobody can have data in
it: it is empty, or it is a copy that was begun. Anything else is refused (`ForeignImage`) and not touched. An image
that a person has restored by hand has no mark either, and gets it by hand.

Deleting takes the time of the data, so an image goes to RBD's trash, at once, and is removed from there in the
background, when it has been there for `trash_keep_s`. An image with snapshots that still exist keeps them: it is
renamed to `deleted.<id>.<image id>`, the volume's id is free, and the image goes when its last snapshot does.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.engines.protocol import ForeignImage, ImageMissing
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.provisioning import directory, header, image_change, image_use
from crust.ceph import binding
from crust.ceph.binding import Image, Ioctx
from crust.ceph.failures import ignoring
from crust.core import errors, volumes

MARK = "crust.volume"
DELETED = "deleted."
ORDER_BYTES = 4 * 1024**2
FEATURES = ("LAYERING", "EXCLUSIVE_LOCK", "OBJECT_MAP", "FAST_DIFF", "DEEP_FLATTEN")


@dataclass(frozen=True, slots=True)
class VolumeImages:
    """The images of volumes in `place`."""

    place: Place
    trash_keep_s: int = 0
    """How long the trash keeps an image, for `rbd trash restore`."""

    def exists(self, volume_id: volumes.VolumeId) -> bool:
        """Whether there is an image of that name."""
        with self.place.ioctx(f"cannot look for the image of {volume_id}") as ioctx:
            return self.place.has_image(ioctx, volume_id)

    def create(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Make the image. Raises `ForeignImage`."""
        with (
            self.place.ioctx(f"cannot create the image of {volume_id}") as ioctx,
            self.making(ioctx, volume_id, size_bytes),
        ):
            self.place.images.create(
                ioctx, volume_id, size_bytes, old_format=False, features=features()
            )

    @contextmanager
    def making(self, ioctx: Ioctx, volume_id: str, size_bytes: int) -> Iterator[None]:
        """The block makes the image; then it is finished. Raises `ForeignImage` if there is one of that name."""
        directory.forget_removed(ioctx, volume_id)
        try:
            yield
        except binding.load().rbd.ImageExists as err:
            raise ForeignImage(volume_id, self.place.shown, "created") from err
        self.finish(ioctx, volume_id, size_bytes)

    def finish(self, ioctx: Ioctx, volume_id: str, size_bytes: int) -> None:
        """Give the image its size, and mark it as complete."""
        with self.place.image(ioctx, volume_id, read_only=False) as image:
            if image.size() < size_bytes:
                _enlarge(image, size_bytes)
            image.metadata_set(MARK, volume_id)

    def grow(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Grow the image to `size_bytes`, never shrink it; its clients learn of it. Raises `ImageMissing`."""
        what = f"cannot grow the image of {volume_id}"
        with self.place.turn(volume_id), self.place.ioctx(what) as ioctx:
            try:
                if self._size(ioctx, volume_id) >= size_bytes:
                    return
                with image_change.changing(self.place, ioctx, volume_id) as image:
                    if image.size() < size_bytes:
                        _enlarge(image, size_bytes)
            except binding.load().rbd.ImageNotFound as err:
                raise ImageMissing(volume_id) from err

    def check_removable(self, volume_id: volumes.VolumeId) -> None:
        """Raise `StillAttached` while a client has it open, or a sandbox has a claim on it, and `ForeignImage`."""
        with (
            self.place.ioctx(f"cannot look who uses the image of {volume_id}") as ioctx,
            ignoring(errno.ENOENT),
        ):
            self._check_own(ioctx, volume_id)
            image_use.check_unused(self.place, ioctx, volume_id)

    def delete(self, volume_id: volumes.VolumeId) -> None:
        """Move the image to the trash; or aside, as long as it has snapshots.

        Raises `StillAttached`, and `ForeignImage`.
        """
        what = f"cannot delete the image of {volume_id}"
        with self.place.turn(volume_id), self.place.ioctx(what) as ioctx:
            if not self.place.has_image(ioctx, volume_id):
                directory.forget_removed(ioctx, volume_id)
                image_use.forget_deletion(ioctx, volume_id)
                return
            try:
                self._check_own(ioctx, volume_id)
                with image_use.deleting(self.place, ioctx, volume_id):
                    self._put_away(ioctx, volume_id)
            except binding.load().rbd.ImageNotFound:
                # an id without a header: a create was killed within librbd
                with ignoring(errno.ENOENT):
                    self.place.images.remove(ioctx, volume_id)

    def _check_own(self, ioctx: Ioctx, volume_id: str) -> None:
        with self.place.image(ioctx, volume_id) as image:
            if not is_marked(image, volume_id) and not _is_begun(image):
                raise ForeignImage(volume_id, self.place.shown, "deleted")

    def _put_away(self, ioctx: Ioctx, name: str) -> None:
        with self.place.image(ioctx, name) as image:
            image_id, kept = image.id(), user_snapshots(image)
        aside = f"{DELETED}{name}.{image_id}"
        if directory.finish_renaming(ioctx, image_id, name, aside):
            self.drop_deleted(ioctx, aside)
        elif kept:
            self.place.images.rename(ioctx, name, aside)
        else:
            self.place.images.trash_move(ioctx, name, self.trash_keep_s)

    def drop_deleted(self, ioctx: Ioctx, name: str) -> None:
        """Move an image of a deleted volume to the trash, if its last snapshot is gone."""
        if not name.startswith(DELETED):
            return
        with ignoring(errno.ENOENT):
            with self.place.image(ioctx, name) as image:
                kept = user_snapshots(image)
            if not kept:
                self.place.images.trash_move(ioctx, name, self.trash_keep_s)

    def all_of(self, ioctx: Ioctx, volume_id: str) -> list[str]:
        """The image of the volume, and those of deleted volumes of that id whose snapshots exist."""
        found = [volume_id] if self.place.has_image(ioctx, volume_id) else []
        prefix = f"{DELETED}{volume_id}."
        return found + [each for each in self.place.names(ioctx) if each.startswith(prefix)]

    def image_ids(self) -> frozenset[volumes.VolumeId]:
        """The names of all images but those of deleted volumes."""
        with self.place.ioctx(f"cannot list {self.place.shown}") as ioctx:
            names = self.place.names(ioctx)
        return frozenset(volumes.VolumeId(each) for each in names if not each.startswith(DELETED))

    def image_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The image's size; 0 if it cannot be opened."""
        try:
            with self.place.ioctx(f"cannot look at {volume_id}") as ioctx:
                return self._size(ioctx, volume_id)
        except errors.CrustError:
            return 0

    def own_size_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The size of the image, which says that it is the volume's. Raises `ImageMissing`, `ForeignImage`."""
        with self.place.ioctx(f"cannot look at the image of {volume_id}") as ioctx:
            found = header.read(ioctx, volume_id, MARK)
        if found is None:
            raise ImageMissing(volume_id)
        if found.value != volume_id:
            raise ForeignImage(volume_id, self.place.shown)
        return found.size_bytes

    def is_empty(self, volume_id: volumes.VolumeId) -> bool:
        """Whether no object of the image, or of what it is a clone of, exists. Raises `ImageMissing`."""
        with self.place.ioctx(f"cannot look at the image of {volume_id}") as ioctx:
            try:
                with self.place.image(ioctx, volume_id) as image:
                    return is_blank(image)
            except binding.load().rbd.ImageNotFound as err:
                raise ImageMissing(volume_id) from err

    def image_problem(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        """It is not the volume's by its mark, or is smaller than it was created. Raises `ImageMissing`."""
        try:
            present_bytes = self.own_size_bytes(volume_id)
        except ForeignImage as err:
            return str(err)
        if present_bytes < size_bytes:
            return f"the image has {present_bytes} bytes and should have {size_bytes}"
        return ""

    def _size(self, ioctx: Ioctx, name: str) -> int:
        with self.place.image(ioctx, name) as image:
            return image.size()


def _enlarge(image: Image, size_bytes: int) -> None:
    """librbd compares the sizes itself: another client may have made it larger since, with data there."""
    image.resize(size_bytes, allow_shrink=False)


def features() -> int:
    """The features of every image: clones, an object map for differences and its speed, and deep flattening."""
    rbd = binding.load().rbd
    return sum(int(getattr(rbd, f"RBD_FEATURE_{each}")) for each in FEATURES)


def is_marked(image: Image, volume_id: str) -> bool:
    """Whether the image says that it is complete, and this volume's."""
    return dict(image.metadata_list()).get(MARK) == volume_id


def is_complete(image: Image, name: str) -> bool:
    """Whether the image of that name says that it is complete; a copy that was begun has the mark of its source."""
    return is_marked(image, volume_of(name))


def volume_of(name: str) -> str:
    """The id of the volume that an image of this name is of, or was."""
    if not name.startswith(DELETED):
        return name
    return name.removeprefix(DELETED).rpartition(".")[0]


def _is_begun(image: Image) -> bool:
    """Whether nobody can have data in an image without the mark."""
    return parent(image) != "" or is_blank(image)


def parent(image: Image) -> str:
    """The name of the image that it is a clone of; empty if it is none."""
    try:
        return str(image.get_parent_image_spec()["image_name"])
    except binding.load().rbd.ImageNotFound:
        return ""


def is_blank(image: Image) -> bool:
    """Whether no object of the image exists, by its object map or by looking: no byte of it was ever written."""
    found: list[int] = []
    image.diff_iterate(
        0,
        image.size(),
        None,
        lambda offset, _length, exists: found.append(offset) if exists else None,
        include_parent=True,
        whole_object=True,
    )
    return not found


def user_snapshots(image: Image) -> list[str]:
    """The names of the snapshots that were not deleted."""
    kind = binding.load().rbd.RBD_SNAP_NAMESPACE_TYPE_USER
    return [str(each["name"]) for each in image.list_snaps() if each["namespace"] == kind]


def hidden(image: Image, snapshot: str) -> list[int]:
    """The numbers of the snapshots of that name that were deleted, as long as clones read from them.

    librbd hides a snapshot first, and then removes it: one without clones is left by a client that was killed.
    """
    kind = binding.load().rbd.RBD_SNAP_NAMESPACE_TYPE_TRASH
    found = (each for each in image.list_snaps() if each["namespace"] == kind)
    return [int(each["id"]) for each in found if each["trash"]["original_name"] == snapshot]
