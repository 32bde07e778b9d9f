"""The queries about block devices that the proxy makes; `crust.host.block.devices` implements them. All block."""

from typing import Protocol

from crust import errors, volumes
from crust.host.block.device_sets import DeviceSet


class Devices(Protocol):
    """The node's block devices."""

    def identify(self, path: str, /) -> volumes.DeviceIdentity:
        """The device's identity; raises `errors.NotFound`, `devices.NotABlockDevice`."""

    def size_bytes(self, path: str, /) -> int:
        """The device's size now; raises as `identify` does."""

    def device_set(self, identity: volumes.DeviceIdentity, /) -> DeviceSet:
        """The devices that share bytes with this one."""


class DeviceNotAsReported(errors.RuntimeFailed):
    """The path that the driver reported does not lead to the device that it reported."""

    def __init__(self, source: volumes.BlockSource, found: str) -> None:
        super().__init__(
            f"the device {source.path} cannot be published to a runtime",
            why=f"the driver reports device {source.identity} there, and {found}",
            hint="read the driver's log; retry if the device was attached again meanwhile",
        )


def set_of(devices: Devices, source: volumes.BlockSource | volumes.NetworkImage) -> DeviceSet:
    """The set of a published device or image. An image is itself alone: this host has no device of it. Blocks."""
    if isinstance(source, volumes.NetworkImage):
        return DeviceSet.alone(source.identity)
    return devices.device_set(source.identity)


def verify(devices: Devices, source: volumes.BlockSource | volumes.NetworkImage) -> DeviceSet:
    """The set of the device that the driver reported; raises `DeviceNotAsReported`. Blocks.

    A reservation of a device that is another one than the driver says would protect nothing. Whether an image exists
    only its cluster knows: the runtime asks it, with the key, before it attaches the image.
    """
    if isinstance(source, volumes.NetworkImage):
        return set_of(devices, source)
    try:
        found = devices.identify(source.path)
    except errors.CrustError as error:
        raise DeviceNotAsReported(source, f"{error.what}: {error.why}") from error
    if found != source.identity:
        raise DeviceNotAsReported(source, f"the kernel has {found}")
    return devices.device_set(found)
