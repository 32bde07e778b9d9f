"""The block devices that share bytes with a device: its disk, its partitions, the devices below it and above it.

A writer to any of them writes to the others, so a reservation covers them all. Two partitions of a disk share no
byte, and neither do two logical volumes of one group. Two paths to one disk (multipath) have different numbers and
the same world-wide name. It reads sysfs alone and opens no device. A set of which a part cannot be read is not seen:
a smaller reservation would protect less than it says.
"""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

from crust.core import volumes
from crust.host import answers
from crust.host.process import syscalls

BY_NUMBER = "/sys/dev/block"
_UNIQUE_NAMES = ("naa.", "eui.", "uuid.")
"""The designators that a standard makes unique. Others (t10.) are a vendor's text, which may name many disks."""

Key = volumes.DeviceIdentity | str
"""A device by its identity, a disk by its world-wide name, or an image on the network by its identity."""


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """The keys of a device (`own`), and of the devices that share bytes with it (`related`), `own` included."""

    own: frozenset[Key]
    related: frozenset[Key]

    @classmethod
    def alone(cls, identity: Key) -> "DeviceSet":
        """A device without known relatives, or an image: no device of this host shares bytes with it."""
        return cls(frozenset({identity}), frozenset({identity}))

    def shares_bytes_with(self, other: "DeviceSet") -> bool:
        return not (self.own.isdisjoint(other.related) and other.own.isdisjoint(self.related))


def device_set(identity: volumes.DeviceIdentity, *, by_number: str = BY_NUMBER) -> DeviceSet:
    """The set of a device; alone if the kernel does not have it, or another device has its number.

    Raises `answers.NotSeen`.
    """

    def look() -> DeviceSet:
        device = _Device.at(_leads_to(f"{by_number}/{identity.major}:{identity.minor}"))
        own = frozenset(device.keys())
        if identity not in own:
            return DeviceSet.alone(identity)
        below, above = _closure(device, _Device.made_of), _closure(device, _Device.made_of_it)
        return DeviceSet(own, own.union(*(device.keys() for device in below | above)))

    what = f"the devices that share bytes with {identity}"
    answer = answers.ask(what, look, needs="sysfs, mounted at /sys")
    return answers.seen(answer) or DeviceSet.alone(identity)


def identity_of(major: int, minor: int) -> volumes.DeviceIdentity:
    """The device that has the number now; a partition has the sequence of its disk. Raises `OSError`."""
    directory = f"{BY_NUMBER}/{major}:{minor}"
    sequence = syscalls.known_attribute(f"{directory}/diskseq")
    if not sequence:
        os.stat(f"{directory}/partition")  # a disk without a sequence has gone
        sequence = syscalls.read_attribute(f"{directory}/../diskseq")
    return volumes.DeviceIdentity(major, minor, int(sequence))


@dataclass(frozen=True, slots=True)
class _Device:
    """A device's directory, with the names in it: most attributes are absent, and one listing shows that."""

    directory: str
    names: frozenset[str] = field(compare=False)

    @classmethod
    def at(cls, directory: str) -> Self:
        return cls(directory, frozenset(syscalls.names_in(directory)))

    def keys(self) -> Iterator[Key]:
        number = self._attribute("dev")
        # a partition has no sequence of its own
        of_disk = f"{self.directory}/../diskseq"
        sequence = self._attribute("diskseq") or syscalls.known_attribute(of_disk)
        if number and sequence:
            major, _, minor = number.partition(":")
            yield volumes.DeviceIdentity(int(major), int(minor), int(sequence))
        if "partition" in self.names:  # the same partition over another path to its disk
            disk, partition = self.at(os.path.dirname(self.directory)), self._attribute("partition")
            yield from (f"{name}, partition {partition}" for name in disk._unique_names())
        yield from self._unique_names()

    def _unique_names(self) -> Iterator[str]:
        for place in ("wwid", "device/wwid"):  # of NVMe, of SCSI
            name = self._attribute(place)
            if name.startswith(_UNIQUE_NAMES):
                yield name

    def made_of(self) -> Iterator[Self]:
        """The devices below this one: the disk of a partition, the slaves of a mapped device."""
        if "partition" in self.names:
            yield self.at(os.path.dirname(self.directory))
        yield from self._linked("slaves")

    def made_of_it(self) -> Iterator[Self]:
        """The devices above this one: the partitions of a disk, the holders."""
        disk = os.path.basename(self.directory)
        for name in self.names:
            # the kernel names a partition after its disk; the other thirty names need no look
            part = f"{self.directory}/{name}"
            if name.startswith(disk) and syscalls.known_attribute(f"{part}/partition"):
                yield self.at(part)
        yield from self._linked("holders")

    def _linked(self, links: str) -> Iterator[Self]:
        if links in self.names:
            for name in syscalls.names_in(f"{self.directory}/{links}"):
                yield self.at(_leads_to(f"{self.directory}/{links}/{name}"))

    def _attribute(self, place: str) -> str:
        name, _, _ = place.partition("/")
        return syscalls.known_attribute(f"{self.directory}/{place}") if name in self.names else ""


def _closure(device: _Device, neighbours: Callable[[_Device], Iterator[_Device]]) -> set[_Device]:
    reached: set[_Device] = set()
    todo = [device]
    while todo:
        neighbours_found = set(neighbours(todo.pop())) - reached
        reached |= neighbours_found
        todo += neighbours_found
    return reached


def _leads_to(link: str) -> str:
    """The directory of a device. Links of sysfs lead to real paths, so one readlink is enough."""
    try:
        return os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
    except OSError as err:
        if err.errno not in (*syscalls.ABSENT, errno.EINVAL):  # it is gone, or no link
            raise
        return link
