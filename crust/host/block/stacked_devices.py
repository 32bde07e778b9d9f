"""What the host's own tools have built upon a block device: a volume group, an array, a map; and how to release it.

A raw volume's bytes belong to a pod. If they look like a part of LVM, md or multipath, the host's tools may activate
it (deploy/host keeps them from it), and the kernel then holds the device without any process that could be named:
only sysfs tells. Read after the kernel has refused an operation, never on the happy path. Nothing is opened, and
nothing is released here: what is on such a device may be mounted.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from crust.host.process import sysfs

_BY_NUMBER = "/sys/dev/block"
_SAFE = re.compile(r"[A-Za-z0-9_.+:@-]+")
"""The name of a map is whatever its creator wanted; in a remedy that people paste there are no other characters."""


@dataclass(frozen=True, slots=True, order=True)
class StackedDevice:
    """A device that holds another one, what it is, and the command that releases it, "" if there is no such."""

    name: str
    kind: str
    remedy: str

    def __str__(self) -> str:
        how = f"; {self.remedy} releases it" if self.remedy else ""
        return f"{self.name} ({self.kind}{how})"


def stacked_on(number: int, *, by_number: str = _BY_NUMBER) -> tuple[StackedDevice, ...]:
    """The devices that hold the one with this `st_rdev`, or a partition of it; () if it is gone."""
    directory = f"{by_number}/{os.major(number)}:{os.minor(number)}"
    return tuple(sorted({_described(holder) for holder in _holders(directory)}))


def _holders(directory: str) -> Iterator[str]:
    for place in (directory, *_partitions(directory)):
        for name in _names(f"{place}/holders"):
            yield os.path.realpath(f"{place}/holders/{name}")


def _partitions(directory: str) -> Iterator[str]:
    for name in _names(directory):
        if os.path.exists(f"{directory}/{name}/partition"):
            yield f"{directory}/{name}"


def _described(directory: str) -> StackedDevice:
    name = os.path.basename(directory)
    if os.path.isdir(f"{directory}/md"):
        return StackedDevice(name, "md array", f"mdadm --stop /dev/{name}")
    if os.path.isdir(f"{directory}/dm"):
        return _mapped(name, _attribute(f"{directory}/dm/name"), _attribute(f"{directory}/dm/uuid"))
    return StackedDevice(name, "block device", "")


def _mapped(name: str, map_name: str, uuid: str) -> StackedDevice:
    if not _SAFE.fullmatch(map_name):
        return StackedDevice(name, "device mapper", f"dmsetup remove /dev/{name}")
    if uuid.startswith("LVM-"):
        group = _volume_group(map_name)
        return StackedDevice(name, f"LVM volume group {group}", f"vgchange -an {group}")
    if uuid.startswith("mpath-"):
        return StackedDevice(name, f"multipath {map_name}", f"multipath -f {map_name}")
    return StackedDevice(name, f"device mapper {map_name}", f"dmsetup remove {map_name}")


def _volume_group(map_name: str) -> str:
    """LVM joins group and volume with a hyphen, and doubles those inside of the names."""
    return re.split(r"(?<!-)-(?!-)", map_name, maxsplit=1)[0].replace("--", "-")


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # it has none, or was detached just now
        return []


def _attribute(path: str) -> str:
    with suppress(OSError):
        return sysfs.read(path)
    return ""
