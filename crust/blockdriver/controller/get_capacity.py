"""GetCapacity: how much room there is for volumes of a kind, and how large or small one of them can be.

A kind that cannot be made here, and a place that is not here, have no room: that is an answer and no error. A
parameter that is not known is an error, as it is when a volume is created with it.
"""

from dataclasses import dataclass

from crust import volumes
from crust.blockdriver.controller import capacity, parameters, topology, volume_size
from crust.blockdriver.node.state import State
from crust.blockdriver.records import capability_check


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

    def __init__(self, shared: State, room: capacity.PoolCapacity) -> None:
        self._state = shared
        self._capacity = room

    def offer(self, asked: CapacityQuery) -> AvailableCapacity:
        """Raises `parameters.UnknownParameter`, `parameters.BadParameter`. Blocks."""
        read = parameters.parse(dict(asked.parameters), self._state.fs_types)
        if not self._can_be_made(asked):
            return AvailableCapacity(0, 0, 0)
        usages = capability_check.usages_of(asked.capabilities, read.fs_type)
        minimum = volume_size.minimum_bytes(
            {each.fs_type for each in usages if each.kind == "mount"}
        )
        available = self._capacity.available_bytes()
        return AvailableCapacity(
            available, min(available, self._state.backend.maximum_bytes()), minimum
        )

    def _can_be_made(self, asked: CapacityQuery) -> bool:
        if asked.place and not topology.is_here(asked.place, self._state.here):
            return False
        modes, fs_types = self._state.backend.modes, self._state.fs_types
        return not any(
            capability_check.obstacle(each, modes=modes, fs_types=fs_types)
            for each in asked.capabilities
        )
