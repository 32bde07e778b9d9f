"""GetCapacity: how much room there is for volumes of a kind, and how large or small one of them can be.

A kind that cannot be made here, and a place that is not here, have no room: that is an answer and no error. A
parameter that is not known is an error, as it is when a volume is created with it.
"""

from dataclasses import dataclass

from crust import volumes
from crust.blockdriver.controller import parameters, topology, volume_size
from crust.blockdriver.controller.capacity import PoolCapacity
from crust.blockdriver.engines.protocol import Backend
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.capability_check import SupportedCapabilities


@dataclass(frozen=True, slots=True)
class CapacityQuery:
    """A GetCapacity; `place` is empty for anywhere."""

    capabilities: tuple[volumes.VolumeCapability, ...]
    parameters: tuple[tuple[str, str], ...]
    place: topology.Segments


@dataclass(frozen=True, slots=True)
class AvailableCapacity:
    """Room in bytes, and the sizes that one volume can have."""

    available_bytes: int
    maximum_bytes: int
    minimum_bytes: int


class CapacityReport:
    """Answers from the same ledger that grants room to new volumes."""

    def __init__(
        self,
        pool_capacity: PoolCapacity,
        backend: Backend,
        supported: SupportedCapabilities,
        segment: str,
    ) -> None:
        """`segment` is the value of this node's topology segment."""
        self._capacity = pool_capacity
        self._backend = backend
        self._supported = supported
        self._segment = segment

    def offer(self, asked: CapacityQuery) -> AvailableCapacity:
        """Raises `parameters.UnknownParameter`, `parameters.BadParameter`. Blocks."""
        read = parameters.parse(dict(asked.parameters), self._supported.fs_types)
        if not self._can_be_made(asked):
            return AvailableCapacity(0, 0, 0)
        usages = capability_check.usages_of(asked.capabilities, read.fs_type)
        minimum = volume_size.minimum_bytes(
            {each.fs_type for each in usages if each.kind == "mount"}
        )
        available = self._capacity.available_bytes()
        return AvailableCapacity(available, min(available, self._backend.maximum_bytes()), minimum)

    def _can_be_made(self, asked: CapacityQuery) -> bool:
        if asked.place and not topology.is_here(asked.place, self._segment):
            return False
        return not any(self._supported.obstacle(each) for each in asked.capabilities)
