"""Which block devices share bytes with a device: its disk, its partitions, what it is made of, what is made of it.

A writer to any of them writes to the others, so a reservation covers them all. Two partitions of a disk share
nothing, nor do two logical volumes of one group. Two paths to one disk (multipath) have different numbers and
the same world-wide name. Only sysfs is read: no device is opened.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

from crust.core import volumes
from crust.host.process import syscalls

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
    device = _Device.at(_leads_to(f"{by_number}/{identity.major}:{identity.minor}"))
    own = frozenset(device.keys())
    if identity not in own:
        return DeviceSet.alone(identity)
    below, above = _closure(device, _Device.made_of), _closure(device, _Device.made_of_it)
    return DeviceSet(own, own.union(*(each.keys() for each in below | above)))


@dataclass(frozen=True, slots=True)
class _Device:
    """A device's directory, with the names in it: of what is looked for most is absent, which one listing tells."""

    directory: str
    names: frozenset[str] = field(compare=False)

    @classmethod
    def at(cls, directory: str) -> Self:
        return cls(directory, frozenset(syscalls.names_in(directory)))

    def keys(self) -> Iterator[Key]:
        number = self._attribute("dev")
        # a partition has no sequence of its own
        sequence = self._attribute("diskseq") or syscalls.known_attribute(
            f"{self.directory}/../diskseq"
        )
        if number and sequence:
            major, _, minor = number.partition(":")
            yield volumes.DeviceIdentity(int(major), int(minor), int(sequence))
        if "partition" in self.names:  # the same one over another path to its disk
            disk, partition = self.at(os.path.dirname(self.directory)), self._attribute("partition")
            yield from (f"{name}, partition {partition}" for name in disk._unique_names())
        yield from self._unique_names()

    def _unique_names(self) -> Iterator[str]:
        for place in ("wwid", "device/wwid"):  # of NVMe, of SCSI
            name = self._attribute(place)
            if name.startswith(_UNIQUE_NAMES):
                yield name

    def made_of(self) -> Iterator[Self]:
        """What the device is made of: the disk of a partition, the slaves of a mapped device."""
        if "partition" in self.names:
            yield self.at(os.path.dirname(self.directory))
        yield from self._linked("slaves")

    def made_of_it(self) -> Iterator[Self]:
        """What is made of the device: the partitions of a disk, the holders."""
        disk = os.path.basename(self.directory)
        for name in self.names:
            # the kernel names a partition after its disk; the other thirty names need no look each
            if name.startswith(disk) and os.path.exists(f"{self.directory}/{name}/partition"):
                yield self.at(f"{self.directory}/{name}")
        yield from self._linked("holders")

    def _linked(self, links: str) -> Iterator[Self]:
        if links in self.names:
            for name in syscalls.names_in(f"{self.directory}/{links}"):
                yield self.at(_leads_to(f"{self.directory}/{links}/{name}"))

    def _attribute(self, place: str) -> str:
        name, _, _ = place.partition("/")
        return syscalls.known_attribute(f"{self.directory}/{place}") if name in self.names else ""


def _closure(device: _Device, neighbours: Callable[[_Device], Iterator[_Device]]) -> set[_Device]:
    found: set[_Device] = set()
    todo = [device]
    while todo:
        new = set(neighbours(todo.pop())) - found
        found |= new
        todo += new
    return found


def _leads_to(link: str) -> str:
    """The directory of a device. Links of sysfs lead to real paths, so nothing has to be looked up on the way."""
    try:
        return os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
    except OSError:  # it is gone, or no link
        return link
