"""Raw block publishes that drivers carry out at the CO's targets: their devices must not go to a runtime as well.

A raw publish leaves no trace on its device: a bind of a device's node is no mount of the device and holds nothing,
and a driver may make the node itself. So the proxy remembers the targets of the raw publishes that pass it, and at
its start it lists the directory where a kubelet has them. Each new deferred publish compares the devices that are at
these targets then: a target that is unpublished, or has another device now, refuses nothing.
"""

import os
import re
from collections.abc import Iterable, Iterator

from crust import errors, volumes
from crust.host.block.device_sets import DeviceSet
from crust.host.block.devices import NotABlockDevice
from crust.proxy.deferrals.devices import Devices

_KUBELETS = "plugins/kubernetes.io/csi/volumeDevices/publish"
"""Below a kubelet's root: `<name of the PV>/<UID of the pod>`."""

_SHIMS = re.compile(r"crust-[0-9a-f]{40}")
"""A shim lets its driver publish a deferred volume there, as a raw device: that is the deferred publish itself."""


class DevicePublishedRaw(errors.NotReady):
    """The device that is to be published to a runtime is published as a raw block volume on this node."""

    def __init__(self, device: str, where: str) -> None:
        super().__init__(
            f"the device {device} cannot be published to a runtime",
            why=f"it is published as a raw block volume at {where}",
            hint="stop the pod that uses it there; two writers to one device destroy its content",
        )
        self.where = where


class RawPublishes:
    """The targets of raw publishes."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._targets: set[str] = set()

    def find(self, roots: Iterable[str]) -> None:
        """Add those of an earlier process, below the roots of kubelets. Blocks."""
        self._targets.update(target for root in roots for target in _below(f"{root}/{_KUBELETS}"))

    def passes(self, target: str) -> None:
        """A raw publish at the target passes now."""
        self._targets.add(target)

    def ended(self, target: str) -> None:
        """The driver has unpublished whatever was at the target."""
        self._targets.discard(target)

    def check(self, source: volumes.BlockSource, shared: DeviceSet, *, readonly: bool) -> None:
        """Raise `DevicePublishedRaw` if a target has the device, or one that shares bytes with it, and one of the two
        publishes can write. Raises too why a target cannot be looked at. Blocks.
        """
        for target in tuple(self._targets):
            try:
                found = self._devices.device_set(self._devices.identify(target))
            except (errors.NotFound, NotABlockDevice):  # nothing is there any more, or not yet
                continue
            if found.shares_bytes_with(shared) and not (readonly and _is_readonly(target)):
                raise DevicePublishedRaw(source.path, target)


def _below(directory: str) -> Iterator[str]:
    try:
        volume_names = os.listdir(directory)
    except OSError:  # no raw volume was ever published here
        return
    for name in volume_names:
        if not _SHIMS.fullmatch(name):
            try:
                yield from (
                    f"{directory}/{name}/{each}" for each in os.listdir(f"{directory}/{name}")
                )
            except OSError:  # another file, or removed meanwhile
                continue


def _is_readonly(target: str) -> bool:
    try:
        return bool(os.statvfs(target).f_flag & os.ST_RDONLY)
    except OSError:
        return False
