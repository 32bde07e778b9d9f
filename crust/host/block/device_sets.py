"""Which block devices share bytes with a device: its disk, its partitions, what it is made of, what is made of it.

A writer to any of them writes to the others, so a reservation covers them all. Two partitions of a disk share
nothing, nor do two logical volumes of one group. Two paths to one disk (multipath) have different numbers and
the same world-wide name. Only sysfs is read: no device is opened.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from crust import volumes
from crust.host.process import sysfs

_BY_NUMBER = "/sys/dev/block"
_UNIQUE_NAMES = ("naa.", "eui.", "uuid.")
"""The designators that a standard makes unique. Others (t10.) are a vendor's text, which may name many disks."""

Key = volumes.DeviceIdentity | str
"""A device by its identity, a disk by its world-wide name, or an image on the network by its identity."""


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """A device and those that share bytes with it. `own` is part of `related`."""

    own: frozenset[Key]
    related: frozenset[Key]

    @classmethod
    def alone(cls, identity: Key) -> "DeviceSet":
        """A device of which nothing else is known, or an image: no device of this host shares bytes with it."""
        return cls(frozenset({identity}), frozenset({identity}))

    def shares_bytes_with(self, other: "DeviceSet") -> bool:
        """Whether one of the two is related to the other."""
        return not (self.own.isdisjoint(other.related) and other.own.isdisjoint(self.related))


def device_set(identity: volumes.DeviceIdentity, *, by_number: str = _BY_NUMBER) -> DeviceSet:
    """The set of a device; alone if the kernel does not have it, or has another one of its number."""
    directory = _leads_to(f"{by_number}/{identity.major}:{identity.minor}")
    own = frozenset(_keys(directory))
    if identity not in own:
        return DeviceSet.alone(identity)
    below, above = _closure(directory, _parts_of), _closure(directory, _made_of_it)
    return DeviceSet(own, own.union(*map(_keys, below | above)))


def _closure(directory: str, neighbours: Callable[[str], Iterator[str]]) -> set[str]:
    found: set[str] = set()
    todo = [directory]
    while todo:
        new = set(neighbours(todo.pop())) - found
        found |= new
        todo += new
    return found


def _parts_of(directory: str) -> Iterator[str]:
    """What the device is made of: the disk of a partition, the slaves of a mapped device."""
    if os.path.exists(f"{directory}/partition"):
        yield os.path.dirname(directory)
    yield from _links(f"{directory}/slaves")


def _made_of_it(directory: str) -> Iterator[str]:
    """What is made of the device: the partitions of a disk, the holders."""
    disk = os.path.basename(directory)
    for name in _names(directory):
        # the kernel names a partition after its disk; the other thirty names need no look each
        if name.startswith(disk) and os.path.exists(f"{directory}/{name}/partition"):
            yield f"{directory}/{name}"
    yield from _links(f"{directory}/holders")


def _links(directory: str) -> Iterator[str]:
    for name in _names(directory):
        yield _leads_to(f"{directory}/{name}")


def _leads_to(link: str) -> str:
    """The directory of a device. Links of sysfs lead to real paths, so nothing has to be looked up on the way."""
    try:
        return os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
    except OSError:  # it is gone, or no link
        return link


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # the device has none, or was detached just now
        return []


def _keys(directory: str) -> Iterator[Key]:
    number = _attribute(f"{directory}/dev")
    # a partition has no sequence of its own
    sequence = _attribute(f"{directory}/diskseq") or _attribute(f"{directory}/../diskseq")
    if number and sequence:
        major, _, minor = number.partition(":")
        yield volumes.DeviceIdentity(int(major), int(minor), int(sequence))
    for place in ("wwid", "device/wwid"):  # of NVMe, of SCSI
        name = _attribute(f"{directory}/{place}")
        if name.startswith(_UNIQUE_NAMES):
            yield name


def _attribute(path: str) -> str:
    try:
        return sysfs.read(path)
    except OSError:
        return ""
