"""The bytes that the volumes and snapshots of this namespace have in their Ceph pool.

Ceph says how much a whole pool has stored, with the images of other namespaces and programs, and with the trash.
Which of it is the driver's own, only the images say: an object map says which objects exist, and the existing ones
are looked at, because an object may hold less than its size. Of a snapshot that counts which its volume, or the next
snapshot, has written over; of the youngest snapshot of a deleted volume all. That takes the time of the data, so a
thread looks, and pauses twenty times as long after a look.

The number is a lower bound: what is not seen yet counts as others'. After a start it is 0 until the first look ends.
The free bytes are of the managers' statistics, which are some seconds old: what was written since is free in them,
and must not be own too. For `STATISTICS_S` after a look the lesser counts of what it saw and what was known before.
What an image gets after its look is not in it. What guests discard is, until the next look: so it becomes smaller
with the pool's stored bytes. A volume or snapshot that is removed is not counted from then on. librbd compares no
deleted snapshot that a clone reads with a younger one: what was written over since is unseen.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest

from crust.blockdriver.ceph.binding import Image, Ioctx, load
from crust.blockdriver.engines.rbd.provisioning import images, librbd_objects, snapshot_bytes
from crust.blockdriver.engines.rbd.provisioning.background import RepeatedWork
from crust.blockdriver.host.extents import Extent

STATISTICS_S = 20.0
"""The age of the statistics at most, by Ceph's defaults: OSDs report every 5 s (mgr_stats_period), a manager sums up
every 2 s (mgr_tick_period), monitors ask it every 5 s (mon_mgr_digest_period), the engine keeps an answer for 2 s.
"""


@dataclass(eq=False)
class OwnBytes(RepeatedWork):
    """Counts the bytes in `place`, and asks for those of `snapshots` again; `volume_ids` lists the volumes,
    `stored_bytes` asks for the pool's.
    """

    name = "rbd-own-bytes"
    least_pause_s = 60.0
    pause_factor = 20
    """Looks cost a twentieth of a thread's time at most."""

    _snapshots: snapshot_bytes.SnapshotBytes
    _volume_ids: Callable[[], Iterable[str]]
    _stored_bytes: Callable[[], int]
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _seen: "dict[str, Counted]" = field(default_factory=dict, init=False)
    """As `Held.bytes_of`."""
    _removed: set[str] = field(default_factory=set, init=False)
    """Since the present look began."""
    _unseen_bytes: int = field(default=0, init=False)
    _looked_at_bytes: int = field(default=0, init=False)
    """What the pool had stored when the last complete look began."""

    def least_bytes(self, stored_bytes: int) -> int:
        """The number, while the pool has `stored_bytes`."""
        with self._guard:
            discarded_bytes = max(self._looked_at_bytes - stored_bytes, 0)
            now_s = time.monotonic()
            seen_bytes = sum(counted.least_bytes(now_s) for counted in self._seen.values())
            return max(seen_bytes - discarded_bytes, 0)

    def unseen_bytes(self, stored_bytes: int) -> int:
        """What others have stored and may be own: since the last complete look began, or of deleted snapshots."""
        with self._guard:
            return max(stored_bytes - self._looked_at_bytes, 0) + self._unseen_bytes

    def forget(self, key: str) -> None:
        """Do not count a volume or snapshot any more (`Held.bytes_of`)."""
        with self._guard:
            self._removed.add(key)
            self._seen.pop(key, None)

    def look(self, ends: threading.Event | None = None) -> None:
        """Count each image, and ask for its snapshots. A missing one has no bytes; another error ends the look."""
        with self._guard:
            self._removed.clear()
        stored_bytes = self._stored_bytes()
        present = self._snapshots.images()
        volume_ids = set(self._volume_ids())
        seen: set[str] = set()
        unseen_bytes = 0
        for image_id, name in sorted(present.items()):
            if ends is not None and ends.is_set():
                return
            self._snapshots.look(image_id)
            found = self._held(image_id, name if name in volume_ids else "")
            unseen_bytes += found.unseen_bytes
            seen |= found.bytes_of.keys()
            with self._guard:
                now_s = time.monotonic()
                for of in found.bytes_of.keys() - self._removed:
                    before = self._seen.get(of)
                    before_bytes = 0 if before is None else before.least_bytes(now_s)
                    self._seen[of] = Counted(found.bytes_of[of], before_bytes, now_s)
        with self._guard:
            self._seen = {of: counted for of, counted in self._seen.items() if of in seen}
            self._unseen_bytes, self._looked_at_bytes = unseen_bytes, stored_bytes

    def _held(self, image_id: str, volume_id: str) -> "Held":
        with (
            self._place.ioctx(f"cannot count the bytes of the image {image_id}") as ioctx,
            suppress(load().rbd.ImageNotFound),
        ):
            if volume_id or librbd_objects.has_snapshots(ioctx, image_id):
                with self._place.image(ioctx, image_id=image_id) as image:
                    return held(ioctx, image, volume_id)
        return Held()


@dataclass(frozen=True, slots=True)
class Counted:
    """The bytes that a look at `at_s` saw, and those that were known before."""

    seen_bytes: int
    before_bytes: int
    at_s: float

    def least_bytes(self, now_s: float) -> int:
        """The bytes that the statistics have too."""
        is_in_statistics = now_s - self.at_s >= STATISTICS_S
        return self.seen_bytes if is_in_statistics else min(self.seen_bytes, self.before_bytes)


@dataclass(slots=True)
class Held:
    bytes_of: dict[str, int] = field(default_factory=dict)
    """Of the volume by its id, of each snapshot by its `snapshot_bytes.key`."""
    unseen_bytes: int = 0
    """What deleted snapshots may have beside."""


def held(ioctx: Ioctx, image: Image, volume_id: str) -> Held:
    """What the image holds for its snapshots, and for its volume unless that is deleted (an empty id). A clone has
    none of its parent's bytes.
    """
    found = Held()
    present = images.snaps(image)
    for snap, younger in zip_longest(present, present[1:]):
        images.show(image, snap)
        of = snapshot_bytes.key(image.id(), snap.name)
        if younger is None and not volume_id:
            found.bytes_of[of] = _total(images.written(image, images.own_objects(image)))
        elif snap.is_kept:
            # what it has where the next one, or the image, has others or none
            objects = images.own_objects(image)
            images.show(image, younger)
            parts = _common(objects, images.differing(image, snap.name))
            replaced = images.written(image, parts, snap.name)
            images.show(image, snap)
            found.bytes_of[of] = _total(_common(images.written(image, parts), replaced))
        else:
            # the same of a deleted snapshot, at most
            old = snapshot_bytes.object_map(ioctx, image, snap)
            images.show(image, younger)
            new = snapshot_bytes.object_map(ioctx, image, younger)
            if old is not None and new is not None:
                found.unseen_bytes += old.replaced_in(new) * snapshot_bytes.object_bytes(image)
            else:
                images.show(image, snap)
                found.unseen_bytes += _total(images.own_objects(image))
    if volume_id:
        images.show(image, None)
        found.bytes_of[volume_id] = _total(images.written(image, images.own_objects(image)))
    return found


def _total(parts: Iterable[Extent]) -> int:
    return sum(part.length for part in parts)


def _common(first: Iterable[Extent], second: Iterable[Extent]) -> list[Extent]:
    """What is in parts of both lists, which are in order."""
    found: list[Extent] = []
    others = iter(second)
    other = next(others, None)
    for part in first:
        while other is not None and other.offset < part.end:
            start, end = max(part.offset, other.offset), min(part.end, other.end)
            if start < end:
                found.append(Extent(start, end - start))
            if other.end > part.end:
                break
            other = next(others, None)
    return found
