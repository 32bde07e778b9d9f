"""The slots of this node for volumes. A publish to the node takes one, and so does an attach.

A volume has a slot while it is published to the node or attached there. Ephemeral volumes and others that come
without a ControllerPublishVolume get theirs when they are attached; those that were published have one already.

The limit is exact for who asks for it, and for who would be refused; to know it, all that others have attached is
looked at. Who takes a slot far below the limit needs a lower bound of it only.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crust import volumes
from crust.blockdriver.records.index import Index
from crust.blockdriver.records.published_nodes import AttachLimitReached


@dataclass(frozen=True, slots=True)
class Slots:
    """A node's attach limit, and the volumes that have a slot there, as they were at one moment."""

    limit: int
    taken: tuple[volumes.VolumeId, ...]


class AttachSlots:
    """Gives slots to one caller at a time, so that two volumes cannot both take the last one."""

    def __init__(
        self,
        node_id: str,
        index: Index,
        attached_ids: Callable[[], tuple[volumes.VolumeId, ...]],
        limit: Callable[[], int],
        limit_at_least: Callable[[], int] = lambda: 0,
    ) -> None:
        self._node_id = node_id
        self._index = index
        self._attached_ids = attached_ids
        self.limit = limit
        self._limit_at_least = limit_at_least
        self._guard = threading.Lock()
        self._coming: set[volumes.VolumeId] = set()

    def now(self, known: Collection[str] = ()) -> Slots:
        """The node's slots now. A volume that is being published or attached has its slot from the first moment.

        The caller of a limit compares it with the volumes that it knows of. `known` are these, if it does not read
        `Slots.taken`: then the limit is less by the volumes that it does not know of.
        """
        limit = self.limit()
        with self._guard:
            taken = self._taken()
        unknown = taken.difference(known) if known else ()
        return Slots(max(limit - len(unknown), 1), tuple(sorted(taken)))

    def _taken(self) -> set[volumes.VolumeId]:
        """The volumes that have a slot; the guard is held, so none is between `_coming` and the rest."""
        return {*self._coming, *self._index.on_node(self._node_id), *self._attached_ids()}

    @contextmanager
    def taking(self, volume_id: volumes.VolumeId) -> Iterator[None]:
        """Hold a slot for a volume until its publish or attach has ended. Raises `AttachLimitReached`."""
        if not self._takes(volume_id, self._limit_at_least()):
            limit = self.limit()
            if not self._takes(volume_id, limit):
                raise AttachLimitReached(self._node_id, limit)
        try:
            yield
        finally:
            with self._guard:
                self._coming.discard(volume_id)

    def _takes(self, volume_id: volumes.VolumeId, limit: int) -> bool:
        """Give the volume a slot, unless that needs a new one and as many as the limit are taken."""
        with self._guard:
            taken = self._taken()
            if volume_id not in taken and len(taken) >= limit:
                return False
            self._coming.add(volume_id)
            return True
