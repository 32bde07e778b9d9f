"""I/O limits where the storage keeps them itself: neither this host nor a guest is asked."""

from dataclasses import dataclass

from crust import volumes
from crust.blockdriver.engines.protocol import StorageLimits


@dataclass(frozen=True, slots=True)
class EnforcedByStorage:
    """See `node_part.LimitEnforcement`."""

    limits: StorageLimits

    def check(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """The storage takes every limit."""

    def set_on_host(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """Set them in the storage."""
        self.limits.set_limits(volume_id, limits)

    async def set_in_guests(
        self, volume_id: volumes.VolumeId, limits: volumes.IoLimits, before: volumes.IoLimits
    ) -> None:
        """Nothing: a guest's disk is limited by the storage."""
