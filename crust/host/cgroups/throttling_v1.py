"""blkio.throttle.* of control groups v1, where every group has its limits to itself and passes none on.

A line in the group that holds all pods would limit nobody: containers live further down, and each is asked for its
own line. So lines are written to every group of that tree, and to each new one when it appears; two containers of
a volume have its limits each. What the kernel writes back by itself (flusher threads) belongs to the root group,
which therefore has the line too.

The root's lines are also the memory of all this: written first and taken away last, so a device that has none
there has none anywhere, and one look suffices whatever crashed. Source: Linux
Documentation/admin-guide/cgroup-v1/blkio-controller.rst.
"""

import errno
import os
import threading
from collections.abc import Iterator

from crust import volumes
from crust.host.cgroups.throttling_watch import GroupWatch
from crust.host.process import sysfs

_FILES = {
    "blkio.throttle.read_bps_device": "read_bytes_per_second",
    "blkio.throttle.write_bps_device": "write_bytes_per_second",
    "blkio.throttle.read_iops_device": "read_iops",
    "blkio.throttle.write_iops_device": "write_iops",
}
_IOPS_MAX = 2**32 - 1  # what the kernel keeps; it would cut off more in silence
_NONE = volumes.IoLimits()

Device = tuple[int, int]


class Blkio:
    """The limits of every group below the first of `groups` that is in `root`."""

    def __init__(self, root: str, groups: tuple[str, ...]) -> None:
        self._root = root
        self._groups = groups
        self._guard = threading.Lock()
        self._held: dict[Device, volumes.IoLimits] = {}
        self._settled: set[Device] = set()
        self._told: dict[str, int] = {}
        self._watch: GroupWatch | None = None

    def obstacle(self) -> str:
        """Why nothing can be limited, for people; empty if it can."""
        if self._group() is None:
            return f"there is no {' or '.join(self._groups)} in {self._root}"
        missing = [
            each for each in _FILES if not os.access(os.path.join(self._root, each), os.W_OK)
        ]
        return f"{self._root}/{missing[0]} is not there, or cannot be written" if missing else ""

    def get(self, device: volumes.DeviceIdentity) -> volumes.IoLimits:
        """The device's limits, by the root's word."""
        numbers = (device.major, device.minor)
        return volumes.IoLimits(**{
            name: _value(os.path.join(self._root, file), numbers) for file, name in _FILES.items()
        })  # fmt: skip

    def set(self, device: volumes.DeviceIdentity, limits: volumes.IoLimits) -> None:
        """Write the lines everywhere; take them away everywhere."""
        numbers = (device.major, device.minor)
        with self._guard:
            if limits == _NONE:
                self._take_away(device)
            elif self._held.get(numbers) != limits or self.get(device) != limits:
                self._held[numbers] = limits
                _tell(self._root, numbers, limits)
                self._tell_all(numbers, limits)
            else:
                self._tell_new()
            self._settled.add(numbers)
            if self._held and self._watch is None:
                self._watch = self._begin_watch()

    def release(self, device: volumes.DeviceIdentity) -> None:
        """Take the lines away. What was settled in this life, and has none by its word, is not looked at."""
        numbers = (device.major, device.minor)
        with self._guard:
            if numbers in self._held or numbers not in self._settled:
                self._take_away(device)

    def tell_new_groups(self) -> None:
        """Give the groups that are new the lines that the others have."""
        with self._guard:
            if self._held:
                self._tell_new()

    def close(self) -> None:
        """Stop looking for new groups."""
        with self._guard:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()  # outside of the guard: it may be waiting for it

    def _take_away(self, device: volumes.DeviceIdentity) -> None:
        numbers = (device.major, device.minor)
        if numbers not in self._held and self.get(device) == _NONE:
            return
        for group in self._tree():
            _tell(group, numbers, _NONE)
        _tell(self._root, numbers, _NONE)
        self._held.pop(numbers, None)  # not before: after a failure they are there, and known to be

    def _tell_all(self, numbers: Device, limits: volumes.IoLimits) -> None:
        self._tell_new()
        for group in self._told:
            _tell(group, numbers, limits)

    def _tell_new(self) -> None:
        present = {group: _inode(group) for group in self._tree()}
        new = [group for group, inode in present.items() if self._told.get(group) != inode]
        for group in new:
            self._tell_held(group)
        self._told = present

    def _tell_held(self, group: str) -> None:
        for numbers, limits in tuple(self._held.items()):
            try:
                _tell(group, numbers, limits)
            except OSError as err:
                if err.errno != errno.ENODEV:
                    raise
                del self._held[numbers]  # the device is gone, and the others need their lines

    def _tree(self) -> Iterator[str]:
        group = self._group()
        if group is not None:
            yield from (path for path, _, _ in os.walk(group))

    def _begin_watch(self) -> GroupWatch | None:
        group = self._group()
        return GroupWatch(group, self.tell_new_groups) if group is not None else None

    def _group(self) -> str | None:
        paths = (os.path.join(self._root, each).rstrip("/") for each in self._groups)
        return next((each for each in paths if os.path.isdir(each)), None)


def _tell(group: str, numbers: Device, limits: volumes.IoLimits) -> None:
    """Write the four numbers; 0 takes one away. A group that is gone needs none, a device that is gone has none."""
    for file, name in _FILES.items():
        value = getattr(limits, name)
        value = min(value, _IOPS_MAX) if name.endswith("iops") else value
        try:
            fd = os.open(os.path.join(group, file), os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, b"%d:%d %d" % (*numbers, value))
            finally:
                os.close(fd)
        except OSError as err:
            if not os.path.isdir(group) or (err.errno == errno.ENODEV and value == 0):
                continue
            raise


def _inode(group: str) -> int:
    try:
        return os.stat(group).st_ino
    except FileNotFoundError:
        return 0


def _value(path: str, numbers: Device) -> int:
    name = f"{numbers[0]}:{numbers[1]}"
    try:
        text = sysfs.read_bytes(path).decode("ascii")
    except FileNotFoundError:
        return 0  # a kernel that was built without throttling limits nothing
    lines = (line.split() for line in text.splitlines())
    return next((int(value) for device, value in lines if device == name), 0)
