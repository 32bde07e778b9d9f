"""The bytes of the snapshots of this namespace, at most: what volumes lack, once they have written over them.

A snapshot adds the objects that exist in it and were written since the snapshot before it, each as a whole. So an
object counts once however many snapshots have it, as in `rbd du`. Deleted snapshots that clones read count too, also
those of images in the trash. What the oldest snapshot of a clone reads from its parent counts as well: a write to the
clone, or its flattening, copies the parent's object into the snapshots that lack it.

The number's owner is librbd, by its object maps (`librbd_objects`), which it keeps with each write and each removal;
crust records none. `SnapshotBytes` remembers what they said, and asks again at an image only after the driver has
changed its snapshots, and in turn, for changes by hand (`own_bytes`). An image that gives no answer is asked at each
call: it never counts as 0.

Where an image has no valid object map (while it is flattened, or after a restore by hand) diff_iterate looks at its
objects. It begins only at a snapshot that is not deleted, so what was written before a deleted one counts again.
"""

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from crust.blockdriver.ceph.binding import Image, Ioctx, ignoring, load
from crust.blockdriver.engines.pool_access import set_of
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.provisioning import images, librbd_objects


def key(image_id: str, name: str) -> str:
    """A snapshot in the namespace."""
    return f"{image_id} {name}"


def bytes_of(ioctx: Ioctx, image: Image, is_counted: Callable[[str], bool]) -> int:
    """What the snapshots of the image add whose names are counted."""
    present = images.snaps(image)
    return sum(
        added_bytes(ioctx, image, snap, present[:number])
        for number, snap in enumerate(present)
        if is_counted(snap.name)
    )


def added_bytes(
    ioctx: Ioctx, image: Image, snap: images.Snap | None, before: Sequence[images.Snap]
) -> int:
    """What a snapshot, or else the image, has that those `before` have not."""
    images.show(image, snap)
    if before or not images.parent(image):
        objects = object_map(ioctx, image, snap)
        if objects is not None:
            return objects.written() * object_bytes(image)
    since = next((older.name for older in reversed(before) if older.is_kept), None)
    return sum(part.length for part in images.differing(image, since))


def object_map(
    ioctx: Ioctx, image: Image, snap: images.Snap | None
) -> librbd_objects.ObjectMap | None:
    """The object map of the image, or of a snapshot, which is shown; None if it has no valid one."""
    needed = images.features(images.OBJECT_MAP)
    if image.features() & needed == needed and not image.flags():
        with ignoring(errno.ENOENT):  # librbd too goes without a map that is gone
            number = None if snap is None else snap.number
            most_objects = image.size() // object_bytes(image)
            return librbd_objects.read_object_map(ioctx, image.id(), number, most_objects)
    return None


def object_bytes(image: Image) -> int:
    return int(image.stat()["obj_size"])


@dataclass(eq=False)
class SnapshotBytes:
    """The number for a place. Safe from any thread."""

    _place: Namespace
    _removed: Callable[[str], object]
    """Called with the `key` of a removed snapshot."""
    _guard: threading.Condition = field(default_factory=threading.Condition, init=False)
    _bytes_of: dict[str, int] = field(default_factory=dict, init=False)
    """By image id."""
    _due: set[str] | None = field(default=None, init=False)
    """The images to be asked; None is all."""
    _asked: set[str] = field(default_factory=set, init=False)
    """Those that a call asks now."""
    _changes: Counter[str] = field(default_factory=Counter, init=False)
    """How often the driver has changed the snapshots of an image."""
    _taken: dict[str, set[str]] = field(default_factory=dict, init=False)
    """The images of the sets that are being taken, by set."""

    def total(self) -> int:
        """Of all snapshots but those that are being taken. Raises the errors of an image that gives no answer."""
        while True:
            present = self.images() if self._due is None else None
            with self._guard:
                if self._due is None:
                    if present is None:
                        continue  # all are due since a moment ago
                    self._due = {*present, *self._changes}
                self._guard.wait_for(lambda: self._due or not self._asked)
                if not self._due:
                    return sum(self._bytes_of.values())
                image_id = self._due.pop()
                self._asked.add(image_id)
            try:
                self.look(image_id)
            except BaseException:
                self.changed(image_id)
                raise
            finally:
                with self._guard:
                    self._asked.discard(image_id)
                    self._guard.notify_all()

    def images(self) -> dict[str, str]:
        """The ids and names of all images, also in the trash; and of counted ones that are gone, without names."""
        with self._guard:
            found = dict.fromkeys(self._bytes_of, "")
        with self._place.ioctx(f"cannot list {self._place.shown}") as ioctx:
            images = load().images
            for image in (*images.list2(ioctx), *images.trash_list(ioctx)):
                found[str(image["id"])] = str(image["name"])
        return found

    def look(self, image_id: str) -> None:
        """Ask for one image; one that is gone has no snapshots."""
        changes = self._changes[image_id]
        size_bytes = self._answer(image_id)
        with self._guard:
            if self._changes[image_id] != changes:
                return  # it may be an answer of before: the image is due
            self._bytes_of[image_id] = size_bytes
            if not size_bytes:
                del self._bytes_of[image_id]
            if self._due is not None:
                self._due.discard(image_id)

    def _answer(self, image_id: str, *, again: bool = True) -> int:
        with self._place.ioctx(f"cannot count the snapshots of the image {image_id}") as ioctx:
            if not librbd_objects.has_snapshots(ioctx, image_id):
                return 0
            with (
                ignoring(*((errno.ENOENT,) if again else ())),
                self._place.image(ioctx, image_id=image_id) as image,
            ):
                return bytes_of(ioctx, image, lambda name: set_of(name) not in self._taken)
        # a snapshot, or the image, was removed meanwhile
        return self._answer(image_id, again=False)

    def changed(self, image_id: str) -> None:
        """Ask for the image before the next answer."""
        with self._guard:
            self._changes[image_id] += 1
            if self._due is not None:
                self._due.add(image_id)

    @contextmanager
    def removal(self, image_id: str, name: str) -> Iterator[None]:
        """While the block removes a snapshot."""
        try:
            yield
        finally:
            self._removed(key(image_id, name))
            self.changed(image_id)

    @contextmanager
    def without(self, set_id: str) -> Iterator[None]:
        """Do not count a set while the block takes it: its bytes are set aside."""
        self._taken[set_id] = set()
        try:
            yield
        finally:
            for image_id in self._taken.pop(set_id):
                self.changed(image_id)

    def taken(self, set_id: str, image_id: str) -> None:
        """Note that a set, which is being taken, has a snapshot of the image."""
        self._taken[set_id].add(image_id)

    def ask_anew(self) -> None:
        """Ask for all images before the next answer: another controller may have changed them."""
        with self._guard:
            self._due = None
