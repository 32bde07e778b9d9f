"""The slots of this node for volumes. A publish to the node takes one, and so does an attach.

A volume has a slot while it is published to the node or attached there. Volumes that come without a
ControllerPublishVolume get theirs when they are attached; those that were published have one already. The limit is a
setting (`max_volumes`).
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.records.records import Index
from crust.core import errors, volumes


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
        limit: int,
    ) -> None:
        self._node_id = node_id
        self._index = index
        self._attached_ids = attached_ids
        self.limit = limit
        self._guard = threading.Lock()
        self._coming: set[volumes.VolumeId] = set()

    def now(self, known: Collection[str] = ()) -> Slots:
        """The node's slots now. A volume that is being published or attached has its slot from the first moment.

        The caller of a limit compares it with the volumes that it knows of. `known` are these, if it does not read
        `Slots.taken`: then the limit is less by the volumes that it does not know of.
        """
        with self._guard:
            taken = self._taken()
        unknown = taken.difference(known) if known else ()
        return Slots(max(self.limit - len(unknown), 1), tuple(sorted(taken)))

    def _taken(self) -> set[volumes.VolumeId]:
        """The volumes that have a slot; the guard is held, so none is between `_coming` and the rest."""
        return {*self._coming, *self._index.on_node(self._node_id), *self._attached_ids()}

    @contextmanager
    def taking(self, volume_id: volumes.VolumeId) -> Iterator[None]:
        """Hold a slot for a volume until its publish or attach has ended. Raises `AttachLimitReached`."""
        with self._guard:
            taken = self._taken()
            if volume_id not in taken and len(taken) >= self.limit:
                raise errors.Exhausted.named(
                    "AttachLimitReached",
                    f"no more volumes can be published to {self._node_id}",
                    why=f"its attach limit of {self.limit} is reached",
                    hint="unpublish one, or use another node",
                )
            self._coming.add(volume_id)
        try:
            yield
        finally:
            with self._guard:
                self._coming.discard(volume_id)
