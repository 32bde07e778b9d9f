"""The bytes that the volumes of this namespace have in their Ceph pool.

Ceph says how much a whole pool has stored, with the images of other namespaces and programs, and with what snapshots
and the trash keep. Which of it is the volumes' own, only their images say: an object map says which objects exist,
and the existing ones are looked at, because an object may hold less than its size. That takes the time of the data,
so a thread looks, and pauses twenty times as long after a look.

The number is a lower bound: what is not seen yet counts as others'. After a start it is 0 until the first look ends.
What an image gets after its look is not in it. What guests discard is, until the next look: so it becomes smaller
with the pool's stored bytes. A volume that is removed is not counted from then on.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from crust.blockdriver.ceph import binding
from crust.blockdriver.ceph.binding import Image
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.provisioning import images
from crust.blockdriver.engines.rbd.provisioning.background import Looks

PAUSE_S = 60.0
_PAUSE_FACTOR = 20


class OwnBytes(Looks):
    """Counts the bytes of the volumes of `place`; `volume_ids` lists them, `stored_bytes` asks for the pool's."""

    name = "rbd-own-bytes"

    def __init__(
        self,
        place: Place,
        volume_ids: Callable[[], Iterable[str]],
        stored_bytes: Callable[[], int],
    ) -> None:
        super().__init__(place)
        self._volume_ids = volume_ids
        self._stored_bytes = stored_bytes
        self._guard = threading.Lock()
        self._seen: dict[str, int] = {}
        self._removed: set[str] = set()
        """Since the present look began."""
        self._looked_at_bytes = 0
        """What the pool had stored when the last complete look began."""

    def pause_s(self, took_s: float) -> float:
        """The pause after which looks cost a twentieth of a thread's time at most."""
        return max(PAUSE_S, _PAUSE_FACTOR * took_s)

    def least_bytes(self, stored_bytes: int) -> int:
        """The number, while the pool has `stored_bytes`."""
        with self._guard:
            discarded_bytes = max(self._looked_at_bytes - stored_bytes, 0)
            return max(sum(self._seen.values()) - discarded_bytes, 0)

    def unseen_bytes(self, stored_bytes: int) -> int:
        """What the pool has stored since the last complete look began: it may be of others or of the volumes."""
        with self._guard:
            return max(stored_bytes - self._looked_at_bytes, 0)

    def forget(self, volume_id: str) -> None:
        """Do not count a volume any more, before its removal."""
        with self._guard:
            self._removed.add(volume_id)
            self._seen.pop(volume_id, None)

    def look(self, ends: threading.Event | None = None) -> None:
        """Count each volume. One whose image is missing has no bytes; another error ends the look."""
        with self._guard:
            self._removed.clear()
        stored_bytes = self._stored_bytes()
        present = set(self._volume_ids())
        for volume_id in sorted(present):
            if ends is not None and ends.is_set():
                return
            seen_bytes = self._bytes_of(volume_id)
            with self._guard:
                if volume_id not in self._removed:
                    self._seen[volume_id] = seen_bytes
        with self._guard:
            self._seen = {key: size for key, size in self._seen.items() if key in present}
            self._looked_at_bytes = stored_bytes

    def _bytes_of(self, volume_id: str) -> int:
        with (
            self._place.ioctx(f"cannot count the bytes of {volume_id}") as ioctx,
            suppress(binding.load().rbd.ImageNotFound),
            self._place.image(ioctx, volume_id) as image,
        ):
            return written_bytes(image)
        return 0


def written_bytes(image: Image) -> int:
    """The bytes that the image's own objects hold; a clone has none of its parent's."""
    sizes: list[int] = []

    def note(_: int, length: int, exists: bool) -> None:  # noqa: FBT001 - librbd calls it
        if exists:
            sizes.append(length)

    for part in images.own_objects(image):
        image.diff_iterate(
            part.offset, part.length, None, note, include_parent=False, whole_object=False
        )
    return sum(sizes)
