"""A node's limits by device, as numbers. A test says whether the kernel can limit, and what fails next."""

from dataclasses import dataclass, field

from crust.blockdriver.host.throttling import CannotThrottle, Throttle
from crust.core import errors, volumes

NONE = volumes.IoLimits()


@dataclass
class FakeThrottle(Throttle):
    """`throttling.Throttle`. `obstacle`: why nothing can be limited. `failure` is raised by the next `set`."""

    lines: dict[tuple[int, int], volumes.IoLimits] = field(default_factory=dict)
    obstacle: str = ""
    failure: errors.CrustError | None = None

    def look(self) -> None:
        """There is nothing to find."""

    def check_can_limit(self) -> None:
        """Refuses if there is an obstacle."""
        if self.obstacle:
            raise CannotThrottle(self.obstacle)

    def limits_of(self, device: volumes.DeviceIdentity) -> volumes.IoLimits:
        return self.lines.get((device.major, device.minor), NONE)

    def set(self, device: volumes.DeviceIdentity, limits: volumes.IoLimits) -> None:
        if limits != NONE:
            self.check_can_limit()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        self.lines.pop((device.major, device.minor), None)
        if limits != NONE:
            self.lines[device.major, device.minor] = limits
