"""The queries about block devices that the proxy makes; `crust.host.block.devices` implements them. Both block."""

from typing import Protocol

from crust import volumes


class Devices(Protocol):
    """The node's block devices."""

    def identify(self, path: str, /) -> volumes.DeviceIdentity:
        """The device's identity; raises `errors.NotFound`, `devices.NotABlockDevice`."""

    def size_bytes(self, path: str, /) -> int:
        """The device's size now; raises as `identify` does."""
