"""What each image has to itself, counted again only where it may have changed since.

An image changes while it is attached, and by what this engine does to it. And it changes without being touched: once
a copy that shares blocks with it is deleted, they are its own; so whatever shares blocks is counted again after any
deletion, and for a while after it, because xfs gives blocks back in the background. Nothing else writes to the pool's
files; if somebody does, the next `recount` finds it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from crust import volumes
from crust.host.files.owned import Owned

SETTLING_S = 60.0
"""Much longer than a filesystem takes to give back the blocks of a file that was unlinked."""

Count = Callable[[volumes.VolumeId], Owned | None]
"""Counts an image's blocks now; None for one that is gone."""


class Occupancy:
    """What is known, and what is not any more. Safe from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._unknown: set[volumes.VolumeId] = set()
        self._sharing: set[volumes.VolumeId] = set()
        self._owned: dict[volumes.VolumeId, int] = {}
        self._settled_at = 0.0

    def recount(self, all_ids: Iterable[volumes.VolumeId]) -> None:
        """Take nothing for known."""
        with self._guard:
            self._unknown.update(all_ids, self._sharing, self._owned)

    def touched(self, volume_id: volumes.VolumeId) -> None:
        """The image may have changed. Said after the change, or a count during it would be believed."""
        with self._guard:
            self._unknown.add(volume_id)

    def deleted(self, volume_id: volumes.VolumeId | None = None) -> None:
        """An image, or a snapshot, is gone: what it shared may be another's own now."""
        with self._guard:
            self._settled_at = self._clock() + SETTLING_S
            if volume_id is not None:
                self._unknown.add(volume_id)

    def now(
        self, attached: Iterable[volumes.VolumeId], count: Count
    ) -> Mapping[volumes.VolumeId, int]:
        """The bytes that each image has to itself, of those that have any."""
        for volume_id in self._wanted(attached):
            self._note(volume_id, count(volume_id))
        with self._guard:
            return self._owned.copy()

    def _wanted(self, attached: Iterable[volumes.VolumeId]) -> set[volumes.VolumeId]:
        with self._guard:
            wanted, self._unknown = self._unknown.union(attached), set()
            if self._settled_at:
                wanted |= self._sharing
            if self._clock() >= self._settled_at:
                self._settled_at = 0.0
            return wanted

    def _note(self, volume_id: volumes.VolumeId, found: Owned | None) -> None:
        with self._guard:
            self._sharing.discard(volume_id)
            self._owned.pop(volume_id, None)
            if found is None:
                return
            if found.shares:
                self._sharing.add(volume_id)
            if found.size_bytes:
                self._owned[volume_id] = found.size_bytes
