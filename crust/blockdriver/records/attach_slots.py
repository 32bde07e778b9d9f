"""The slots of this node for volumes. A publish to the node takes one, and so does an attach.

A volume has a slot while it is published to the node or attached there. Ephemeral volumes and others that come
without a ControllerPublishVolume get theirs when they are attached; those that were published have one already.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from crust import volumes
from crust.blockdriver.records.index import Index
from crust.blockdriver.records.published_nodes import AttachLimitReached


class AttachSlots:
    """Gives slots to one caller at a time, so that two volumes cannot both take the last one."""

    def __init__(
        self,
        node_id: str,
        index: Index,
        attached_ids: Callable[[], tuple[volumes.VolumeId, ...]],
        limit: Callable[[], int],
    ) -> None:
        self._node_id = node_id
        self._index = index
        self._attached_ids = attached_ids
        self.limit = limit
        self._guard = threading.Lock()
        self._coming: set[volumes.VolumeId] = set()

    def taken(self) -> set[volumes.VolumeId]:
        """The volumes that have a slot."""
        return {*self._index.on_node(self._node_id), *self._attached_ids()}

    @contextmanager
    def taking(self, volume_id: volumes.VolumeId) -> Iterator[None]:
        """Hold a slot for a volume until its publish or attach has ended. Raises `AttachLimitReached`."""
        limit = self.limit()
        with self._guard:
            taken = self.taken() | self._coming
            if volume_id not in taken and len(taken) >= limit:
                raise AttachLimitReached(self._node_id, limit)
            self._coming.add(volume_id)
        try:
            yield
        finally:
            with self._guard:
                self._coming.discard(volume_id)
