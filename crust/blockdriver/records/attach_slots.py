"""The slots of this node for volumes. A publish to the node takes one, and so does an attach.

A volume has a slot while it is published to the node or attached there. Volumes that come without a
ControllerPublishVolume get theirs when they are attached; those that were published have one already. The limit is a
setting (`max_volumes`).
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from crust.blockdriver.engines.node_access import NodeAccess
from crust.blockdriver.records.records import Index
from crust.core import errors, volumes


class AttachSlots:
    """Gives slots to one caller at a time, so that two volumes cannot both take the last one."""

    def __init__(self, node_id: str, index: Index, access: NodeAccess, limit: int) -> None:
        self._node_id = node_id
        self._index = index
        self._access = access
        self.limit = limit
        self._guard = threading.Lock()
        self._coming: set[volumes.VolumeId] = set()

    def now(self, known: Collection[str] = ()) -> tuple[int, tuple[volumes.VolumeId, ...]]:
        """The node's limit, and the volumes that have a slot now: from the first moment of a publish or attach.

        The caller of a limit compares it with the volumes that it knows of. `known` are these, if it does not read
        the list: then the limit is less by the volumes that it does not know of.
        """
        with self._guard:
            taken = self._taken()
        unknown = taken.difference(known) if known else ()
        return max(self.limit - len(unknown), 1), tuple(sorted(taken))

    def _taken(self) -> set[volumes.VolumeId]:
        """The volumes that have a slot; the guard is held, so none is between `_coming` and the rest."""
        return {*self._coming, *self._index.on_node(self._node_id), *self._access.attached_here()}

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
