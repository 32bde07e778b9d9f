"""Volumes that are made: empty, or clones that share the unwritten parts with a snapshot or volume.

The cost of a clone does not depend on its source. Each clone of a clone makes reads and opens slower, so the
background work flattens a clone that is deeper than `SOFT_DEPTH`: it gets all its data, and no parent. If flattening
cannot keep up, a clone at `HARD_DEPTH` is refused until it has.

A clone of a volume is a clone of a snapshot that is deleted at once; RBD keeps it until the clone is flattened or
removed. The intent of the volume has the source (`records`), so the next controller removes the snapshot that a
killed controller has left there. The list of the volumes to flatten is in the pool, too:

    crust.work       flatten.<volume id>   a value of its own
"""

import errno
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.ceph import omap
from crust.blockdriver.ceph.binding import Ioctx, ignoring, load
from crust.blockdriver.engines.pool_access import RecordKind
from crust.blockdriver.engines.protocol import ForeignImage
from crust.blockdriver.engines.protocol import Image as Snapshot
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.provisioning import image_use, librbd_objects
from crust.blockdriver.engines.rbd.provisioning.images import MARK, enlarge, features, parent
from crust.blockdriver.engines.rbd.provisioning.snapshots import RbdSnapshots
from crust.blockdriver.engines.rbd.records import RbdContentRecords
from crust.core import errors, volumes

WORK = "crust.work"
FLATTEN = "flatten."
SOFT_DEPTH = 4
HARD_DEPTH = 12


@dataclass(slots=True)
class NewRbdVolume:
    """A volume that is being made, beside the others in `snapshots`."""

    snapshots: RbdSnapshots
    volume_id: volumes.VolumeId
    is_committed: bool = False
    _note: bytes = b""
    """The intent's note."""

    def create(self, size_bytes: int) -> None:
        with (
            self.snapshots.place.ioctx(f"cannot create the image of {self.volume_id}") as ioctx,
            self._finished(ioctx, size_bytes),
        ):
            load().images.create(
                ioctx, self.volume_id, size_bytes, old_format=False, features=features()
            )

    def allocate(self, size_bytes: int) -> None:
        """Never called: no volume is thick here."""
        raise NotImplementedError

    def restore(self, image: Snapshot, size_bytes: int) -> None:
        """A clone of the snapshot. Raises `SnapshotMissing`, CloneDepthReached, `ForeignImage`."""
        error_text = f"cannot make {self.volume_id} from {image.snapshot_id}"
        with self.snapshots.place.ioctx(error_text) as ioctx:
            source = self.snapshots.image_of(ioctx, image)
            self._clone(ioctx, source, image.snapshot_id, size_bytes)

    def clone(self, source: volumes.VolumeId, *, source_bytes: int, size_bytes: int) -> None:
        """A clone of a snapshot that is taken for the clone. Raises `ImageMissing`, SourceTruncated."""
        place = self.snapshots.place
        with place.volume(source, f"cannot make {self.volume_id} from {source}") as ioctx:
            image_use.check_answers(place, ioctx, source)  # before anything is noted
            self._note = source.encode()
            self.snapshots.volume_records.note(self.volume_id, self._note)
            name = _snapshot_for(self.volume_id)
            with image_use.changing(place, ioctx, source) as image:
                if image.size() < source_bytes:
                    raise errors.Corrupt.named(
                        "SourceTruncated",
                        f"the image of {source} is damaged",
                        why=f"it has {image.size()} bytes and should have {source_bytes}",
                    )
                image.create_snap(name)
            self._clone(ioctx, source, name, size_bytes)
            self.snapshots.remove_snapshot(ioctx, source, name)

    def commit(self, records: Mapping[RecordKind, bytes]) -> None:
        """The content record, then the volume record."""
        content = RbdContentRecords(self.snapshots.place)
        content.make(self.volume_id, records[RecordKind.CONTENT])
        record = records[RecordKind.VOLUMES]
        self.snapshots.volume_records.commit(self.volume_id, record, self._note)
        self.is_committed = True

    @contextmanager
    def _finished(self, ioctx: Ioctx, size_bytes: int) -> Iterator[None]:
        """Give the image of the block its size, and the mark of a complete one. Raises `ForeignImage`."""
        librbd_objects.forget_removed(ioctx, self.volume_id)
        try:
            yield
        except load().rbd.ImageExists as err:
            raise ForeignImage(self.volume_id, self.snapshots.place.shown, "created") from err
        with self.snapshots.place.image(ioctx, self.volume_id, read_only=False) as image:
            enlarge(image, size_bytes)
            image.metadata_set(MARK, self.volume_id)

    def _clone(self, ioctx: Ioctx, source: str, snapshot: str, size_bytes: int) -> None:
        depth_of_clone = depth(self.snapshots.place, ioctx, source) + 1
        if depth_of_clone > HARD_DEPTH:
            put_flatten(ioctx, source)
            raise errors.OperationPending.named(
                "CloneDepthReached",
                f"{self.volume_id} cannot be made yet",
                why=f"its source is a clone of {depth_of_clone - 1} others in a row, which are being flattened",
            )
        if depth_of_clone > SOFT_DEPTH:
            put_flatten(ioctx, self.volume_id)
        with self._finished(ioctx, size_bytes):
            load().images.clone(ioctx, source, snapshot, ioctx, self.volume_id, features=features())


def clear(snapshots: RbdSnapshots, volume_id: volumes.VolumeId, source: str) -> None:
    """Remove the snapshot that a clone of `source` to this volume has left, and the note to flatten the volume."""
    with snapshots.place.ioctx(f"cannot clear the source of {volume_id}") as ioctx:
        if source:
            snapshots.remove_snapshot(ioctx, source, _snapshot_for(volume_id))
        with ignoring(errno.ENOENT):
            omap.swap(ioctx, WORK, {}, {FLATTEN + volume_id: None})


def depth(place: Namespace, ioctx: Ioctx, name: str) -> int:
    """The number of parents of an image in a row."""
    parents = 0
    while parents < HARD_DEPTH + 1:
        with place.image(ioctx, name) as image:
            name = parent(image)
        if not name:
            return parents
        parents += 1
        if not place.has_image(ioctx, name):
            return parents  # it is in the trash: its own parents do not count
    return parents


def put_flatten(ioctx: Ioctx, name: str) -> None:
    """Note that the image must be flattened; the value is new each time, to distinguish it from an earlier note."""
    omap.swap(ioctx, WORK, {}, {FLATTEN + name: secrets.token_hex(8).encode()})


def _snapshot_for(volume_id: str) -> str:
    """The name of the snapshot of the source, while the volume is cloned from it."""
    return f"clone-{volume_id}"
