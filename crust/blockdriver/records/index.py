"""An in-memory index of all volume records: ids in order, sizes, and the volumes of each node.

The records are the truth and the index is derived from them, so that a page of a list, the sum of reserved bytes and
a node's attach limit cost the same with 20 volumes and with 2,000. It changes only when a record does.
"""

import bisect
import threading
from collections import defaultdict
from dataclasses import dataclass

from crust import volumes
from crust.blockdriver.records.volume_record import VolumeRecord


@dataclass(frozen=True, slots=True)
class _Entry:
    capacity_bytes: int
    nodes: tuple[str, ...]
    finished: bool
    readable: bool


class Index:
    """The index. Safe from any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._ids: list[volumes.VolumeId] = []
        self._entries: dict[volumes.VolumeId, _Entry] = {}
        self._reserved_bytes = 0
        self._on_node: defaultdict[str, set[volumes.VolumeId]] = defaultdict(set)

    def clear(self) -> None:
        """Remove all entries."""
        with self._guard:
            self._ids.clear()
            self._entries.clear()
            self._on_node.clear()
            self._reserved_bytes = 0

    def put(self, volume_id: volumes.VolumeId, record: VolumeRecord | None) -> None:
        """Set a volume's record; None for one that cannot be read."""
        nodes = tuple(each.node_id for each in record.nodes) if record else ()
        finished = record is None or record.phase == "ready"
        size_bytes = record.capacity_bytes if record else 0
        entry = _Entry(size_bytes, nodes, finished, readable=record is not None)
        with self._guard:
            if volume_id in self._entries:
                self._subtract(volume_id)
            else:
                bisect.insort(self._ids, volume_id)
            self._entries[volume_id] = entry
            self._reserved_bytes += entry.capacity_bytes
            for node_id in entry.nodes:
                self._on_node[node_id].add(volume_id)

    def drop(self, volume_id: volumes.VolumeId) -> None:
        """Remove a volume; absent is a success."""
        with self._guard:
            if volume_id in self._entries:
                self._subtract(volume_id)
                del self._entries[volume_id]
                del self._ids[bisect.bisect_left(self._ids, volume_id)]

    def page(self, after: str, count: int) -> tuple[volumes.VolumeId, ...]:
        """At most `count` ids greater than `after`, in order; all of them for 0."""
        with self._guard:
            first = bisect.bisect_right(self._ids, volumes.VolumeId(after))
            return tuple(self._ids[first : first + count] if count else self._ids[first:])

    def has(self, volume_id: volumes.VolumeId) -> bool:
        """Whether there is a record of the volume, readable or not."""
        with self._guard:
            return volume_id in self._entries

    def capacity_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The size on record; 0 for a volume without a readable one."""
        with self._guard:
            entry = self._entries.get(volume_id)
            return entry.capacity_bytes if entry else 0

    def unfinished(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes that are being created or deleted, interrupted ones included."""
        with self._guard:
            return tuple(each for each in self._ids if not self._entries[each].finished)

    def unreadable(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes whose record cannot be read; their size is not known here."""
        with self._guard:
            return tuple(each for each in self._ids if not self._entries[each].readable)

    def reserved_bytes(self) -> int:
        """The sum of all sizes that are known."""
        with self._guard:
            return self._reserved_bytes

    def on_node(self, node_id: str) -> frozenset[volumes.VolumeId]:
        """The volumes that are published to a node."""
        with self._guard:
            return frozenset(self._on_node.get(node_id, ()))

    def _subtract(self, volume_id: volumes.VolumeId) -> None:
        entry = self._entries[volume_id]
        self._reserved_bytes -= entry.capacity_bytes
        for node_id in entry.nodes:
            self._on_node[node_id].discard(volume_id)
