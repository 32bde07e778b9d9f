"""The holders that keep a mount or a device busy, for the error message after the kernel has refused an operation.

Holders are mounts, loop devices, processes, and the devices that LVM, md or multipath built upon a device: if the
bytes of a raw volume look like a part of one, the host's tools may activate it (deploy/host prevents that). The
kernel then holds the device without any process, and only sysfs names the holder.

The search reads /proc of every process, which takes milliseconds, and so never runs on the happy path. It is best
effort: processes start and end meanwhile, and processes of other PID namespaces are not visible. A process's open
file may be on a file server that hangs, so the search uses only the kernel's own data.
"""

import errno
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from crust.core import errors
from crust.host.block import loopctl
from crust.host.mounts import mountinfo
from crust.host.process import arguments, syscalls

_SHOWN = 5
_BY_NUMBER = "/sys/dev/block"
_IN_MEMORY = ("devtmpfs", "tmpfs", "ramfs")


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A process and its hold: by "cwd", "root", "exe", "fd 3" or "map"; `writes` is known for devices only."""

    pid: int
    command: str
    by: str
    writes: bool = False

    def __str__(self) -> str:
        return f"{self.command}[{self.pid}] by {self.by}"


Openers = Mapping[tuple[int, int], tuple[Holder, ...]]
"""The processes that have a block device open, by its number."""


class DeviceInUse(errors.NotReady):
    """A device or mount has a mount on it, a process that holds it, or another device that the host built upon it."""

    def __init__(
        self,
        path: str,
        mounts: tuple[str, ...] = (),
        loops: tuple[str, ...] = (),
        holders: tuple[Holder, ...] = (),
        stacked: tuple[str, ...] = (),
    ) -> None:
        users = (
            ("mounted at", mounts),
            ("backing", loops),
            ("used by", tuple(map(str, holders))),
            ("part of", stacked),
        )
        super().__init__(
            f"{path} is in use",
            why=", ".join(f"{how} {_some(texts)}" for how, texts in users if texts)
            or "the kernel does not say what holds it: perhaps a process of another PID namespace",
            hint="unmount it, stop the process that holds it, or release what is built upon it; "
            "crust never detaches lazily",
        )
        self.path = path
        self.mounts = mounts
        self.loops = loops
        self.holders = holders
        self.stacked = stacked

    @property
    def is_explained(self) -> bool:
        """Whether a user of the device was found. If not, the hold may have lasted a moment only."""
        return bool(self.mounts or self.loops or self.holders or self.stacked)


def device_in_use(path: str, related: Collection[tuple[int, int]] = ()) -> DeviceInUse:
    """The error for a busy device, with its mounts, loop devices and processes, and those of `related` devices."""
    try:
        number = os.stat(path).st_rdev
    except OSError:
        return DeviceInUse(path)
    numbers = {(os.major(number), os.minor(number)), *related}
    return DeviceInUse(
        path,
        tuple(mount.target for mount in mountinfo.of_devices(numbers, "self")),
        tuple(sorted({loop for number in numbers for loop in _loops_on(os.makedev(*number))})),
        of_devices(numbers),
        tuple(sorted({above for number in numbers for above in stacked_on(os.makedev(*number))})),
    )


def is_exclusively_held(path: str) -> bool:
    """Whether an exclusive open of the device is refused now: it is mounted, held with O_EXCL or part of another
    device.
    """
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as err:
        return err.errno == errno.EBUSY
    return False


def mount_in_use(target: str) -> DeviceInUse:
    """The error for a busy mount, with the mounts and loop devices on it and the processes that use it."""
    mounts = tuple(m.target for m in mountinfo.below(target))
    return DeviceInUse(target, mounts, _loops_below(target), of_mount(target))


def of_devices(
    numbers: Collection[tuple[int, int]], opened: Openers | None = None
) -> tuple[Holder, ...]:
    """The processes that have a block device with one of these numbers open; `opened`, if known, is now."""
    opened = openers() if opened is None else opened
    return tuple(sorted(holder for number in numbers for holder in opened.get(number, ())))


def openers() -> Openers:
    """The processes that have block devices open.

    The process that serves a network block device (`pid` in sysfs: rbd-nbd, qemu-nbd) has it open all the time, and
    is no user of it.
    """
    openers_of: dict[tuple[int, int], tuple[Holder, ...]] = {}
    for pid, fd in _descriptors():
        try:
            device = syscalls.block_device_at(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if device is None:
            continue
        number = (os.major(device), os.minor(device))
        if syscalls.known_attribute(f"{_BY_NUMBER}/{number[0]}:{number[1]}/pid") != pid:
            holder = _holder(pid, f"fd {fd}", writes=_writes(pid, fd))
            openers_of[number] = (*openers_of.get(number, ()), holder)
    return openers_of


def _writes(pid: str, fd: str) -> bool:
    try:
        with open(f"/proc/{pid}/fdinfo/{fd}", "rb") as file:
            flags = next(line for line in file if line.startswith(b"flags:"))
    except (OSError, StopIteration):  # closed meanwhile
        return False
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY


def stacked_on(number: int, *, by_number: str = _BY_NUMBER) -> tuple[str, ...]:
    """The names of the devices that hold the device with this `st_rdev`, or a partition of it; () if it is gone."""
    directory = f"{by_number}/{os.major(number)}:{os.minor(number)}"
    parts = [
        name
        for name in syscalls.names_in(directory)
        if os.path.exists(f"{directory}/{name}/partition")
    ]
    places = [f"{directory}/holders", *(f"{directory}/{part}/holders" for part in parts)]
    names = {
        _shown(f"{place}/{name}", name) for place in places for name in syscalls.names_in(place)
    }
    return tuple(sorted(names))


def _shown(directory: str, name: str) -> str:
    """A device's name, and for a map the name that its creator gave it: vg-lv, mpatha."""
    mapped = syscalls.known_attribute(f"{directory}/dm/name")
    return f"{name} ({mapped})" if mapped else name


def of_mount(target: str) -> tuple[Holder, ...]:
    """The processes that use files of the mount at `target`."""
    mount = mountinfo.at(target)
    if mount is None:
        return ()
    target = mount.target
    holders: set[Holder] = set()
    for pid in _processes():
        holders.update(_holder(pid, by) for by in _links_below(pid, target))
        holders.update(_holder(pid, "map") for _ in _maps_below(pid, target))
    for pid, fd in _descriptors():
        with suppress(OSError):
            if mountinfo.mount_id_of(pid, fd) == mount.mount_id:
                holders.add(_holder(pid, f"fd {fd}"))
    return tuple(sorted(holders))


def _some(texts: tuple[str, ...]) -> str:
    others = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {others} more" if others > 0 else "")


def _holder(pid: str, by: str, *, writes: bool = False) -> Holder:
    return Holder(int(pid), arguments.command_of(int(pid)), by, writes)


def _processes() -> Iterator[str]:
    yield from (name for name in os.listdir("/proc") if name.isdecimal())


def _descriptors() -> Iterator[tuple[str, str]]:
    """The process and the number of each descriptor of a file that has a path; sockets and pipes have none."""
    for pid in _processes():
        directory = f"/proc/{pid}/fd"
        for fd in syscalls.names_in(directory):
            try:
                path = os.readlink(f"{directory}/{fd}")
            except OSError:  # closed meanwhile
                continue
            if path[0] == "/" and path != "/dev/null":
                yield pid, fd


def _loops_below(target: str) -> tuple[str, ...]:
    """The loop devices of files in a mount, or backed by the device whose node is bound there."""
    with suppress(OSError):
        bound = syscalls.block_device_at(target)
        if bound is not None:
            return _loops_on(bound)
        return tuple(
            f"/dev/loop{number}"
            for number in loopctl.attached_numbers()
            if loopctl.backing_file(number).startswith(f"{target}/")
        )
    return ()


def _loops_on(number: int) -> tuple[str, ...]:
    """The loop devices backed by a block device: a kubelet keeps one on each raw volume.

    Nodes of devices are in memory. It opens no loop device of other files: the kernel would ask the file's server,
    which may hang. A node whose bind was detached since (`umount --lazy`, the end of a container) has the path "/":
    it opens such a loop device if that is no larger than the device.
    """
    # a mount before the mount that it covers
    mounts = sorted(mountinfo.read_all(), key=lambda mount: len(mount.target))[::-1]
    nodes: list[str] = []
    for loop_number in loopctl.attached_numbers():
        with suppress(OSError):
            backing = loopctl.backing_file(loop_number)
            mount = next((mount for mount in mounts if _covers(mount, backing)), None)
            is_askable = (mount is not None and mount.fs_type in _IN_MEMORY) or (
                backing == "/" and _may_be_upon(loop_number, number)
            )
            if is_askable and _is_backed_by(loop_number, number):
                nodes.append(f"/dev/loop{loop_number}")
    return tuple(nodes)


def _may_be_upon(loop_number: int, number: int) -> bool:
    """Compare the sizes in sysfs: a loop device keeps its size when the device below it grows."""
    below = int(
        syscalls.read_attribute(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/size")
    )
    return loopctl.size_bytes(loop_number) <= below * 512


def _covers(mount: mountinfo.Mount, path: str) -> bool:
    return path == mount.target or path.startswith(mount.target.rstrip("/") + "/")


def _is_backed_by(loop_number: int, number: int) -> bool:
    with syscalls.closing(os.open(loopctl.node(loop_number), os.O_RDONLY)) as fd:
        return loopctl.status(fd).backing_device == number


def _links_below(pid: str, target: str) -> Iterator[str]:
    for name in ("cwd", "root", "exe"):
        with suppress(OSError):
            link = os.readlink(f"/proc/{pid}/{name}")
            if link == target or link.startswith(target + "/"):
                yield name


def _maps_below(pid: str, target: str) -> Iterator[None]:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        if f" {target}/" in text:
            yield None
