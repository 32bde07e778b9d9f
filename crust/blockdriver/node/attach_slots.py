"""The slots of this node for attached volumes, as many as `LiveVolumes.attach_limit`.

The controller part keeps the same limit at ControllerPublishVolume, but an ephemeral volume comes without one. So the
limit is also kept here, where every volume is attached.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from crust import volumes
from crust.blockdriver.node.live_volumes import LiveVolumes
from crust.blockdriver.records.published_nodes import AttachLimitReached


class AttachSlots:
    """Gives slots to one caller at a time, so that two volumes cannot both take the last one."""

    def __init__(self, live: LiveVolumes, node_id: str) -> None:
        self._live = live
        self._node_id = node_id
        self._guard = threading.Lock()
        self._coming: set[volumes.VolumeId] = set()

    @contextmanager
    def taking(self, volume_id: volumes.VolumeId) -> Iterator[None]:
        """Hold a slot for a volume during its attach; an attached volume has one already. Raises
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
