"""Volumes from snapshots and from volumes: clones that share what they have not written.

A clone costs the same whatever its source holds. Each clone of a clone makes reads and opens slower, so a clone
that is deeper than `SOFT_DEPTH` is flattened in the background: it gets all its data, and no parent. `HARD_DEPTH` is
only reached where flattening cannot keep up, and refused until it has.

A clone of a volume is one of a snapshot that is deleted at once; RBD keeps it until the clone is flattened or
removed. What is begun is noted in the pool before, so that the next controller finishes what a killed one left:

    crust.work       clone.<volume id>     the source whose temporary snapshot may be left
                     flatten.<volume id>   to be flattened
"""

import errno
import secrets
from dataclasses import dataclass

from crust.blockdriver.engines.protocol import Image as Snapshot
from crust.blockdriver.engines.protocol import ImageMissing, SnapshotMissing
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.provisioning import image_change, image_use
from crust.blockdriver.engines.rbd.provisioning.images import VolumeImages, features
from crust.blockdriver.engines.rbd.provisioning.snapshots import RbdSnapshots
from crust.ceph import binding, omap
from crust.ceph.binding import Ioctx
from crust.ceph.failures import ignoring
from crust.core import errors, volumes

WORK = "crust.work"
_CLONE, FLATTEN = "clone.", "flatten."
SOFT_DEPTH = 4
HARD_DEPTH = 12


@dataclass(frozen=True, slots=True)
class RbdCopies:
    """Makes images from others in `place`."""

    place: Place
    images: VolumeImages
    snapshots: RbdSnapshots

    def restore(self, volume_id: volumes.VolumeId, snapshot: Snapshot, size_bytes: int) -> None:
        """A clone of the snapshot. Raises `SnapshotMissing`, CloneDepthReached, `ForeignImage`."""
        with self.place.ioctx(f"cannot make {volume_id} from {snapshot.snapshot_id}") as ioctx:
            source = self.snapshots.image_of(ioctx, snapshot)
            if not source:
                raise SnapshotMissing(snapshot.snapshot_id)
            self._clone(ioctx, source, snapshot.snapshot_id, volume_id, size_bytes)

    def clone(
        self, volume_id: volumes.VolumeId, source: str, *, source_bytes: int, size_bytes: int
    ) -> None:
        """A clone of a snapshot that is taken for it. Raises `ImageMissing`, SourceTruncated."""
        name = f"clone-{volume_id}"
        with self.place.ioctx(f"cannot make {volume_id} from {source}") as ioctx:
            try:
                image_use.check_answers(self.place, ioctx, source)  # before anything is noted
                omap.put(ioctx, WORK, {_CLONE + volume_id: source.encode()})
                self._snapshot(ioctx, source, name, source_bytes)
                self._clone(ioctx, source, name, volume_id, size_bytes)
                self._forget(ioctx, volume_id, source)
            except binding.load().rbd.ImageNotFound as err:
                raise ImageMissing(source) from err

    def clear(self, volume_id: volumes.VolumeId) -> None:
        """Remove what a clone to this volume has left at its source; nothing is a success."""
        with self.place.ioctx(f"cannot clear what {volume_id} was made from") as ioctx:
            keys = (_CLONE + volume_id, FLATTEN + volume_id)
            with ignoring(errno.ENOENT):
                found = omap.read_keys(ioctx, WORK, keys)
                if source := found.get(keys[0], b"").decode():
                    self._forget(ioctx, volume_id, source)
                if keys[1] in found:
                    omap.drop(ioctx, WORK, (keys[1],))

    def depth(self, ioctx: Ioctx, name: str) -> int:
        """How many parents an image has in a row."""
        found = 0
        while name and found < HARD_DEPTH + 1:
            with self.place.image(ioctx, name) as image:
                try:
                    name = str(image.get_parent_image_spec()["image_name"])
                except binding.load().rbd.ImageNotFound:
                    return found
            found += 1
            if not self.place.has_image(ioctx, name):
                return found  # in the trash: its own parents are not looked at
        return found

    def _snapshot(self, ioctx: Ioctx, source: str, name: str, source_bytes: int) -> None:
        with image_change.changing(self.place, ioctx, source) as image:
            if image.size() < source_bytes:
                raise errors.Corrupt.named(
                    "SourceTruncated",
                    f"the image of {source} is damaged",
                    why=f"it has {image.size()} bytes and should have {source_bytes}",
                    hint="find out who shrank it; nothing was copied",
                )
            image.create_snap(name)

    def _clone(
        self, ioctx: Ioctx, source: str, snapshot: str, volume_id: str, size_bytes: int
    ) -> None:
        depth = self.depth(ioctx, source) + 1
        if depth > HARD_DEPTH:
            self._put_flatten(ioctx, source)
            raise errors.OperationPending.named(
                "CloneDepthReached",
                f"{volume_id} cannot be made yet",
                why=f"its source is a clone of {depth - 1} others in a row, which are being flattened",
                hint="retry; flattening copies all data of a volume once",
            )
        if depth > SOFT_DEPTH:
            self._put_flatten(ioctx, volume_id)
        with self.images.making(ioctx, volume_id, size_bytes):
            self.place.images.clone(ioctx, source, snapshot, ioctx, volume_id, features=features())

    def _put_flatten(self, ioctx: Ioctx, name: str) -> None:
        """With a value of its own, so that whoever has done an earlier one does not drop this one."""
        omap.put(ioctx, WORK, {FLATTEN + name: secrets.token_hex(8).encode()})

    def _forget(self, ioctx: Ioctx, volume_id: str, source: str) -> None:
        self.snapshots.remove(ioctx, source, f"clone-{volume_id}")
        omap.drop(ioctx, WORK, (_CLONE + volume_id,))
