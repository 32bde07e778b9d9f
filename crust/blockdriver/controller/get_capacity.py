"""GetCapacity: the free capacity for volumes of a kind, and the largest and smallest size of one.

For capabilities or a topology that this driver cannot serve the answer is 0, not an error. An unknown parameter is an
error, as at CreateVolume.
"""

from dataclasses import dataclass

from crust import volumes
from crust.blockdriver.controller import parameters, topology, volume_size
from crust.blockdriver.controller.capacity import PoolCapacity
from crust.blockdriver.engines.protocol import Provisioning
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.capability_check import SupportedCapabilities


@dataclass(frozen=True, slots=True)
class CapacityQuery:
    """A decoded GetCapacityRequest; `place` is empty for any topology."""

    capabilities: tuple[volumes.VolumeCapability, ...]
    parameters: tuple[tuple[str, str], ...]
    place: topology.Segments


@dataclass(frozen=True, slots=True)
class AvailableCapacity:
    """Free bytes, and the limits for the size of one volume."""

    available_bytes: int
    maximum_bytes: int
    minimum_bytes: int


class CapacityReport:
    """Answers from the same numbers that decide about new volumes."""

    def __init__(
        self,
        pool_capacity: PoolCapacity,
        provisioning: Provisioning,
        supported: SupportedCapabilities,
        segment: str,
    ) -> None:
        """`segment` is the value of this node's topology segment."""
        self._capacity = pool_capacity
        self._provisioning = provisioning
        self._supported = supported
        self._segment = segment

    def available(self, query: CapacityQuery) -> AvailableCapacity:
        """The available capacity. Raises `parameters.UnknownParameter`, `parameters.InvalidParameter`. Blocks."""
        read = parameters.parse(dict(query.parameters), self._supported.fs_types)
        if not self._can_be_made(query):
            return AvailableCapacity(0, 0, 0)
        usages = capability_check.usages_of(query.capabilities, read.fs_type)
        minimum = volume_size.minimum_bytes(
            {each.fs_type for each in usages if each.kind == "mount"}
        )
        available = self._capacity.available_bytes()
        return AvailableCapacity(
            available, min(available, self._provisioning.maximum_bytes()), minimum
        )

    def _can_be_made(self, query: CapacityQuery) -> bool:
        if query.place and not topology.is_here(query.place, self._segment):
            return False
        return not any(self._supported.obstacle(each) for each in query.capabilities)
