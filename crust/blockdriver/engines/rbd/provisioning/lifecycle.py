"""A volume comes into being and goes: the order of image, content record and volume record.

    make      intent; image, mark; content record; in one operation the volume record for the intent
    remove    in one operation an intent for the volume record; claim; image; content record; no intent

librbd and the records share no transaction, so a crash leaves an intent (`intents`). The next call for the volume, or
the next start, ends it as removed. What was half made goes only if nobody has used it: an intent can be older than
the image, restored from a backup. A removal that finds a user of the image, who came before the claim, is taken back.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.engines.protocol import (
    ForeignImage,
    Image,
    StillAttached,
    orphan_image,
)
from crust.blockdriver.engines.rbd.intents import Intents, State, undone
from crust.blockdriver.engines.rbd.provisioning.copies import RbdCopies
from crust.blockdriver.engines.rbd.provisioning.images import VolumeImages
from crust.blockdriver.engines.rbd.records import RbdContentRecords
from crust.core import errors, volumes


@dataclass(frozen=True, slots=True)
class VolumeLifecycle:
    """Makes and removes volumes. The caller makes one call per volume at a time."""

    intents: Intents
    content: RbdContentRecords
    images: VolumeImages
    copies: RbdCopies

    @contextmanager
    def making(self, volume_id: volumes.VolumeId) -> Iterator["RbdMaking"]:
        """See `Provisioning.making`."""
        self.settle(volume_id)
        if self.images.exists(volume_id):
            raise orphan_image(volume_id, "an image of that name")
        self.intents.begin(volume_id)
        making = RbdMaking(self, volume_id)
        with undone(volume_id, making, lambda: self.settle(volume_id)):
            yield making

    def remove(self, volume_id: volumes.VolumeId) -> None:
        """See `Provisioning.remove`."""
        state = self.intents.state(volume_id)
        if state.record is None:
            self._settle(volume_id, state)
            return
        self.images.check_removable(volume_id)
        self.intents.begin_removal(volume_id, state.record, state.record)
        self._finish_removal(volume_id, state.record)

    def settle(self, volume_id: volumes.VolumeId) -> None:
        """See `Provisioning.settle`. Raises CreatingVolumeUsed."""
        self._settle(volume_id, self.intents.state(volume_id))

    def _settle(self, volume_id: volumes.VolumeId, state: State) -> None:
        if state.making is not None:
            self._undo(volume_id)
        elif state.removing is not None:
            self._finish_removal(volume_id, state.removing)

    def _undo(self, volume_id: volumes.VolumeId) -> None:
        if not self.content.is_first(volume_id):
            raise errors.Corrupt.named(
                "CreatingVolumeUsed",
                f"the volume {volume_id} is not removed",
                why="it is noted as half made, and its content record was written since: the note is of a backup",
                hint="restore a newer copy of the volume records; nothing was changed",
            )
        self._clear(volume_id)

    def _finish_removal(self, volume_id: volumes.VolumeId, record: bytes) -> None:
        try:
            self._clear(volume_id)
        except (StillAttached, ForeignImage):  # since it was looked at, or by somebody else
            self.intents.put_back(volume_id, record)
            raise

    def _clear(self, volume_id: volumes.VolumeId) -> None:
        self.copies.clear(volume_id)
        self.images.delete(volume_id)
        self.content.remove(volume_id)
        self.intents.end(volume_id)


@dataclass(slots=True)
class RbdMaking:
    """A volume that is being made."""

    lifecycle: VolumeLifecycle
    volume_id: volumes.VolumeId
    is_committed: bool = False

    def create(self, size_bytes: int) -> None:
        """An image without objects."""
        self.lifecycle.images.create(self.volume_id, size_bytes)

    def restore(self, image: Image, size_bytes: int) -> None:
        """A clone of the snapshot."""
        self.lifecycle.copies.restore(self.volume_id, image, size_bytes)

    def clone(self, source: volumes.VolumeId, *, source_bytes: int, size_bytes: int) -> None:
        """A clone of a snapshot that is made for it."""
        self.lifecycle.copies.clone(
            self.volume_id, source, source_bytes=source_bytes, size_bytes=size_bytes
        )

    def commit(self, records: Mapping[RecordKind, bytes]) -> None:
        """The content record, then the volume record."""
        self.lifecycle.content.make(self.volume_id, records[RecordKind.CONTENT])
        self.lifecycle.intents.commit(self.volume_id, records[RecordKind.VOLUMES])
        self.is_committed = True
