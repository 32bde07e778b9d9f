"""From a device's number to its node in /dev, and from a disk to its partitions, by sysfs."""

import os
import stat

from crust.core import errors
from crust.host.process import oserrors, sysfs

_BY_NUMBER = "/sys/dev/block"
_CRYPT = "CRYPT-"


class DeviceNodeMissing(errors.NotReady):
    """A block device has no node in /dev, or the node there is that of another device."""

    def __init__(self, number: str, path: str) -> None:
        super().__init__(
            f"the block device {number} cannot be handed to a runtime",
            why=f"{path} is not its device node",
            hint="check that this process sees the host's /dev, and that udev has finished",
        )


def node_of(number: int) -> str:
    """The path of the device's node in /dev. Raises `DeviceNodeMissing`."""
    name = _uevent(number).get("DEVNAME", "")
    path = f"/dev/{name}"
    try:
        found = os.stat(path)
    except OSError as err:
        raise DeviceNodeMissing(_text(number), path) from err
    if not stat.S_ISBLK(found.st_mode) or found.st_rdev != number:
        raise DeviceNodeMissing(_text(number), path)
    return path


def partition_of(number: int, partition: int) -> int:
    """The number of a partition's device; the device itself if it is that partition. Raises `PartitionMissing`."""
    directory = f"{_BY_NUMBER}/{_text(number)}"
    with oserrors.translating(f"cannot look at the partitions of {_text(number)}"):
        if _is_partition(directory, partition):
            return number
        for name in os.listdir(directory):
            if _is_partition(f"{directory}/{name}", partition):
                major, _, minor = sysfs.read(f"{directory}/{name}/dev").partition(":")
                return os.makedev(int(major), int(minor))
    raise errors.NotReady.named(
        "PartitionMissing",
        f"{_uevent(number).get('DEVNAME', _text(number))} has no partition {partition}",
        why="the volume's context names it, and the kernel does not show it",
        hint="check the disk's partition table, or correct `partition` in the volume's attributes",
    )


def is_encrypted(number: int) -> bool:
    """Whether the device is a dm-crypt mapping: smaller than what is below it, by its header."""
    return sysfs.known(f"{_BY_NUMBER}/{_text(number)}/dm/uuid").startswith(_CRYPT)


def _is_partition(directory: str, partition: int) -> bool:
    return sysfs.known(f"{directory}/partition") == str(partition)


def _uevent(number: int) -> dict[str, str]:
    with oserrors.translating(
        f"cannot look at the device {_text(number)}", hint="check whether it was detached"
    ):
        text = sysfs.read(f"{_BY_NUMBER}/{_text(number)}/uevent")
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _text(number: int) -> str:
    return f"{os.major(number)}:{os.minor(number)}"
