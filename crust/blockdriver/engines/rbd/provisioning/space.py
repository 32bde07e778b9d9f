"""The space of a Ceph pool, by the statistics that the managers gather: a few seconds old.

    size = what is stored in the pool + what can still be stored, at most the pool's quota

Ceph counts what is stored after replication and gives what can be stored after it, so these are bytes of volumes.
What other namespaces of the pool hold is in `size_bytes`; it is not free, so it is never given out. Snapshots share
their blocks with images and Ceph does not count them apart: their bytes are among those that are not free.
"""

import json
import time
from dataclasses import dataclass, field
from typing import Any

from crust.blockdriver.engines.protocol import PoolSpace
from crust.blockdriver.engines.rbd.place import Place
from crust.core import errors

_FRESH_S = 2.0


@dataclass(slots=True)
class CephSpace:
    """The space of the pool of `place`, asked for once in two seconds: 64 creates at once are one question."""

    place: Place
    _known: PoolSpace | None = None
    _at_s: float = field(default=0.0)

    def space(self) -> PoolSpace:
        """The space. Raises CephStatisticsMissing, `CephMonitorsUnreachable`."""
        known = self._known
        if known is not None and time.monotonic() - self._at_s < _FRESH_S:
            return known
        found = self._ask()
        self._known, self._at_s = found, time.monotonic()
        return found

    def _ask(self) -> PoolSpace:
        answer: dict[str, Any] = json.loads(self.place.connection.command("df", detail="detail"))
        for each in answer["pools"]:
            if each["name"] == self.place.pool:
                return _space(each["stats"])
        raise errors.PeerUnavailable.named(
            "CephStatisticsMissing",
            f"the capacity of the Ceph pool {self.place.pool!r} is unknown",
            why="no manager (ceph-mgr) has reported it",
            hint="start a manager; it takes a few seconds after that",
        )


def _space(stats: dict[str, Any]) -> PoolSpace:
    stored, free = int(stats["stored"]), int(stats["max_avail"])
    quota = int(stats.get("quota_bytes", 0))
    if quota:
        free = min(free, max(quota - stored, 0))
    return PoolSpace(size_bytes=stored + free, free_bytes=free, snapshot_bytes=0)
