"""The slots that this node has for attached volumes: as many as `LiveVolumes.attach_limit` says, and no more.

The controller part keeps the same limit, and a pod's own volume comes without a controller's word. So it is kept here
too, where a volume is attached, whoever sent it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from crust import volumes
from crust.blockdriver.node.live_volumes import LiveVolumes
from crust.blockdriver.records.published_nodes import AttachLimitReached


class AttachSlots:
    """Gives slots out, one caller at a time, so that two volumes do not both take the last one."""

    def __init__(self, live: LiveVolumes, node_id: str) -> None:
        self._live = live
        self._node_id = node_id
        self._guard = threading.Lock()
        self._coming: set[volumes.VolumeId] = set()

    @contextmanager
    def taking(self, volume_id: volumes.VolumeId) -> Iterator[None]:
        """Hold a slot for a volume while it is attached; one that is attached has its own. Raises
        `AttachLimitReached`.
        """
        limit = self._live.attach_limit()
        with self._guard:
            taken = {*self._live.attached_ids(), *self._coming}
            if volume_id not in taken and len(taken) >= limit:
                raise AttachLimitReached(self._node_id, limit)
            self._coming.add(volume_id)
        try:
            yield
        finally:
            with self._guard:
                self._coming.discard(volume_id)
