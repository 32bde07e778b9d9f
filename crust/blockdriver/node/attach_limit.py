"""The places that this node has for attached volumes: as many as `State.attach_limit` says, and no more.

The controller keeps the same limit, and a pod's own volume comes without a controller's word. So it is kept here too,
where a volume is attached, whoever sent it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from crust import volumes
from crust.blockdriver.controller.controller_publish import AttachLimitReached
from crust.blockdriver.node.state import State


class AttachSlots:
    """Gives places out, one caller at a time, so that two volumes do not both take the last one."""

    def __init__(self, shared: State) -> None:
        self._state = shared
        self._guard = threading.Lock()
        self._coming: set[volumes.VolumeId] = set()

    @contextmanager
    def taking(self, volume_id: volumes.VolumeId) -> Iterator[None]:
        """Hold a place for a volume while it is attached; one that is attached has its own. Raises
        `AttachLimitReached`.
        """
        limit = self._state.attach_limit()
        with self._guard:
            taken = {*self._state.backend.attached_here(), *self._coming}
            if volume_id not in taken and len(taken) >= limit:
                raise AttachLimitReached(self._state.here, limit)
            self._coming.add(volume_id)
        try:
            yield
        finally:
            with self._guard:
                self._coming.discard(volume_id)
