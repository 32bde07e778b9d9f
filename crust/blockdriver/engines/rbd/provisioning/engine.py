"""The engine of a controller: the steps by which volumes and snapshot sets of a Ceph pool come and go.

    make      intent; image, mark; content record; in one operation the volume record for the intent
    remove    in one operation an intent for the volume record; claim; image; content record; no intent
    take      intent, with the snapshots of the set; snapshots; in one operation the record for the intent
    remove    in one operation an intent for the record; snapshots; no intent

librbd and the records share no transaction, so a crash leaves an intent (`records`). The next call for the volume or
set, or the next start, removes the rest. It removes a half made volume only if no node has used it: an intent can be
older than the image, restored from a backup. If a removal finds a client of the image, which came before the claim,
it puts the record back.

Every call blocks for as long as the cluster takes (`crust.blockdriver.ceph.user.Timeouts`), and raises the errors of
`crust.blockdriver.ceph.binding` beside its own.
"""

import errno
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from crust.blockdriver.ceph.binding import ignoring
from crust.blockdriver.engines import protocol
from crust.blockdriver.engines.protocol import ForeignImage, Image, StillAttached
from crust.blockdriver.engines.rbd.pool import OBJECT
from crust.blockdriver.engines.rbd.provisioning import copies, image_use, snapshots
from crust.blockdriver.engines.rbd.provisioning.background import BackgroundWork, Freeing
from crust.blockdriver.engines.rbd.provisioning.images import snaps
from crust.blockdriver.engines.rbd.provisioning.own_bytes import OwnBytes
from crust.blockdriver.engines.rbd.provisioning.snapshot_bytes import SnapshotBytes, added_bytes
from crust.blockdriver.engines.rbd.records import RbdContentRecords, State
from crust.core import errors, volumes

_OBJECT_BYTES = 4 * 1024**2
_MOST_OBJECTS = 256_000_000
"""The most objects of an image with an object map of librbd."""
_FRESH_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RbdProvisioning(snapshots.RbdSnapshots):
    """The volumes and snapshot sets of `place`. The caller makes one call per volume or set at a time."""

    modes = protocol.MODES
    """One writer in the cluster, or any number of readers."""
    raw_modes = protocol.MODES | {volumes.AccessMode.MULTI_NODE_MULTI_WRITER}
    """Several writers too: each has a claim, and RBD orders their writes."""
    is_used_elsewhere = True
    """By the guests and kernels of all nodes."""
    maximum_bytes = _MOST_OBJECTS * _OBJECT_BYTES
    """Of an image with an object map."""

    background: BackgroundWork = field(init=False)
    freeing: Freeing = field(init=False)
    own_bytes: OwnBytes = field(init=False)
    _space: tuple[int, int] | None = field(default=None, init=False)
    """The bytes that are stored in the pool, and those that are free."""
    _space_at_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.background, self.freeing = BackgroundWork(self.place), Freeing(self.place)
        self.snapshot_bytes = SnapshotBytes(self.place, lambda key: self.own_bytes.forget(key))
        self.own_bytes = OwnBytes(
            self.place, self.snapshot_bytes, self.volume_records.ids, lambda: self._asked_space()[0]
        )

    def copies_at_once(self) -> bool:
        """Always: a snapshot is one operation of the cluster."""
        return True

    def added_bytes(self, volume_id: volumes.VolumeId) -> int:
        """By the image's object map. Raises `ImageMissing`."""
        with (
            self.place.volume(volume_id, f"cannot count the blocks of {volume_id}") as ioctx,
            self.place.image(ioctx, volume_id) as image,
        ):
            return added_bytes(ioctx, image, None, snaps(image))

    cloned_bytes = added_bytes
    """A clone reads a snapshot of its source, until it is flattened or removed."""

    def thick_obstacle(self) -> str:
        """Always: an object of an image exists from its first write on."""
        return "Ceph allocates the blocks of an image when they are written"

    def open(self) -> None:
        for volume_or_set_id in self.unsettled():
            try:
                self.settle(volume_or_set_id)
            except errors.PeerUnavailable:
                raise
            except errors.CrustError as err:
                extra = {"id": volume_or_set_id, "error": err}
                _log.warning("an unfinished volume or set stays", extra=extra)
        self.snapshot_bytes.ask_anew()
        self.background.start()
        self.freeing.start()
        self.own_bytes.start()

    def stop(self) -> None:
        self.freeing.stop(limit_s=0)  # the next look begins again
        self.own_bytes.stop(limit_s=0)
        self.background.stop()

    def check_usable(self) -> None:
        """One small read; nothing if only calls bring keys: a pod's key proves nothing about this process."""
        if self.place.is_lent:
            return
        with self.place.ioctx(f"cannot reach {self.place.shown}") as ioctx:
            ioctx.stat(OBJECT)

    @contextmanager
    def making(self, volume_id: volumes.VolumeId) -> Iterator[copies.NewRbdVolume]:
        """After an intent. Raises `CephQuotaReached`."""
        self._settle_volume(volume_id, self.volume_records.state(volume_id))
        with self.place.ioctx(f"cannot look for the image of {volume_id}") as ioctx:
            if self.place.has_image(ioctx, volume_id):
                raise protocol.orphan_image(volume_id, "an image of that name")
        self.volume_records.begin(volume_id)
        making = copies.NewRbdVolume(self, volume_id)
        with self._settled(volume_id, making):
            yield making

    def remove(self, volume_id: volumes.VolumeId) -> None:
        """To the trash, after an intent. Raises `StillAttached` while a client or a sandbox has the image."""
        state = self.volume_records.state(volume_id)
        if state.record is not None:
            with (
                self.place.ioctx(f"cannot look who uses the image of {volume_id}") as ioctx,
                ignoring(errno.ENOENT),
            ):
                self.check_own(ioctx, volume_id)
                image_use.check_unused(self.place, ioctx, volume_id)
            self.volume_records.begin_removal(volume_id, state.record, state.record)
            self.own_bytes.forget(volume_id)
            state = State(removing=state.record)
        self._settle_volume(volume_id, state)
        self.background.wake()

    @contextmanager
    def taking(self, set_id: str, images: Sequence[Image]) -> Iterator[snapshots.NewRbdSnapshotSet]:
        self._settle_set(set_id)
        taking = snapshots.NewRbdSnapshotSet(self, set_id, snapshots.noted(images))
        self.set_records.begin(set_id, taking.note)
        with self.snapshot_bytes.without(set_id), self._settled(volumes.VolumeId(set_id), taking):
            yield taking

    def remove_set(self, set_id: str, images: Sequence[Image]) -> None:
        """After an intent. Volumes that were made from it keep the shared data."""
        record = self.set_records.load(set_id)
        if record is not None:
            self.set_records.begin_removal(set_id, record, snapshots.noted(images))
        self._settle_set(set_id)
        self.background.wake()

    def unsettled(self) -> tuple[volumes.VolumeId, ...]:
        return self.volume_records.unfinished() + self.set_records.unfinished()

    def settle(self, volume_or_set_id: volumes.VolumeId) -> None:
        """Remove the rest of an unfinished volume or set. Raises CreatingVolumeUsed."""
        self._settle_volume(volume_or_set_id, self.volume_records.state(volume_or_set_id))
        self._settle_set(volume_or_set_id)
        self.background.wake()

    @contextmanager
    def _settled(
        self,
        volume_or_set_id: volumes.VolumeId,
        thing: copies.NewRbdVolume | snapshots.NewRbdSnapshotSet,
    ) -> Iterator[None]:
        """Settle what the block does not commit, now or by a later call. Raises the error of the block."""
        try:
            yield
        except Exception:
            try:
                self.settle(volume_or_set_id)
            except errors.CrustError as err:
                text = "an unfinished volume or set stays"
                _log.warning(text, extra={"id": volume_or_set_id, "error": err})
            raise
        if not thing.is_committed:
            self.settle(volume_or_set_id)
        self.background.wake()

    def _settle_volume(self, volume_id: volumes.VolumeId, state: State) -> None:
        content = RbdContentRecords(self.place)
        if state.making is None and state.removing is None:
            return
        if state.making is not None and not content.is_first(volume_id):
            raise errors.Corrupt.named(
                "CreatingVolumeUsed",
                f"the volume {volume_id} is not removed",
                why="it is noted as half made, and its content record was written since: the note is of a backup",
            )
        try:
            copies.clear(self, volume_id, (state.making or b"").decode())
            self.delete_image(volume_id)
        except (StillAttached, ForeignImage):  # since it was looked at, or by somebody else
            if state.removing is not None:
                self.volume_records.put_back(volume_id, state.removing)
            raise
        content.remove(volume_id)
        self.volume_records.end(volume_id)

    def _settle_set(self, set_id: str) -> None:
        state = self.set_records.state(set_id)
        note = state.making if state.making is not None else state.removing
        if note is None:
            return
        with self.place.ioctx(f"cannot delete the snapshots of {set_id}") as ioctx:
            for volume_id, snapshot_id in snapshots.snapshots_of(note):
                self.remove_snapshot(ioctx, volume_id, snapshot_id)
        self.set_records.end(set_id)

    def space(self) -> protocol.PoolSpace:
        """By the managers' statistics, a few seconds old, read once in two seconds: 64 creates at once are one
        question. Raises CephStatisticsMissing, `CephMonitorsUnreachable`.

            free = bytes that can still be stored, at most the pool's quota
            own  = bytes of volumes and snapshots, at least (`OwnBytes`), and not more than all that is stored

        Ceph gives the first without replicas, so they are bytes of volumes. All else that is stored is others'.
        """
        snapshot_bytes = self.snapshot_bytes.total()
        space = self._space
        if space is None or time.monotonic() - self._space_at_s >= _FRESH_S:
            space = self._space = self._asked_space()
            self._space_at_s = time.monotonic()
        stored, free = space
        return protocol.PoolSpace(
            free_bytes=free,
            own_bytes=min(self.own_bytes.least_bytes(stored), stored),
            snapshot_bytes=snapshot_bytes,
            unseen_bytes=self.own_bytes.unseen_bytes(stored),
        )

    def _asked_space(self) -> tuple[int, int]:
        answer: dict[str, Any] = json.loads(self.place.connection.command("df", detail="detail"))
        for pool in answer["pools"]:
            if pool["name"] == self.place.pool:
                stats = pool["stats"]
                stored, free = int(stats["stored"]), int(stats["max_avail"])
                if quota := int(stats.get("quota_bytes", 0)):
                    free = min(free, max(quota - stored, 0))
                return stored, free
        raise errors.PeerUnavailable.named(
            "CephStatisticsMissing",
            f"the capacity of the Ceph pool {self.place.pool!r} is unknown",
            why="no manager (ceph-mgr) has reported it",
        )
