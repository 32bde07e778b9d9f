"""What the proxy asks about block devices; `crust.host.block.devices` answers. Both functions block."""

from typing import Protocol

from crust import volumes


class Devices(Protocol):
    """The node's block devices."""

    def identify(self, path: str, /) -> volumes.DeviceIdentity:
        """Which device this is; raises `errors.NotFound`, `devices.NotABlockDevice`."""

    def size_bytes(self, path: str, /) -> int:
        """The device's size now; raises as `identify` does."""
