"""The users of a block device: mounts, binds of its node, processes, loop devices, devices upon it, writes in flight.

The one owner of the question. `check` refuses a purpose that a user is in the way of; `of` gives the users.

The kernel's exclusive open tells of every exclusive holder (a mount, md, LVM, swap, a claim), in every namespace.
Mountinfo and the open files of all processes name the holders, and alone show a process that has the device open
plainly, as a virtual machine has, and a raw publish, which is a bind of the node. What a process has handed to the
kernel may arrive after its end (io_uring with O_DIRECT): a device with writes in flight has a user. Reads in flight
count for nobody.

A device, process or descriptor that ended meanwhile is no user: the errnos for that are named here. Every other errno
is no answer, and no answer is `NotSeen`. A part of the users is never the answer.

No interface shows a process that has mapped the device and closed it, a kernel target (nvmet) that opens it plainly,
a process of another PID namespace that is not below this one, and a node that a driver has made for a raw publish
itself, until the kubelet binds it.
"""

import enum
import errno
import functools
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from crust.core import errors, volumes
from crust.core.printable import printable, some
from crust.host import answers
from crust.host.answers import Answer, NotSeen
from crust.host.block import device_sets, loopctl
from crust.host.block.holders import DeviceInUse, Holder
from crust.host.block.openers import NEEDS, Number, Openers, openers
from crust.host.mounts import mountinfo
from crust.host.process import hidden, syscalls

T = TypeVar("T")
_GONE = (errno.ENOENT, errno.ENXIO, errno.ENODEV)
"""The kernel does not have the device any more."""
_NODE = "the node of that loop device, which it may open; CAP_MKNOD makes one that is missing"
"""What LOOP_GET_STATUS64 needs: no file of sysfs names the device below."""
_PAUSES_S = (0.0, 0.01, 0.05, 0.15)
"""Before each look at a busy device: udev, smartd or the probe of another publish has it for a moment."""
_FLIGHT_S = 2.0
"""How long `check` waits for the writes of a process that has ended."""
_FLIGHT_PAUSE_S = 0.01
_IN_MEMORY = ("devtmpfs", "tmpfs", "ramfs")
"""The filesystems in which device nodes are."""
_LINES = (*(f" - {fs_type} ".encode() for fs_type in _IN_MEMORY), b"/volumeDevices/")
"""Texts of the lines of mountinfo that may be binds of nodes: a kubelet also binds a node that a driver has made."""


class Purpose(enum.Enum):
    """The caller's use of the device, which decides who is in the way."""

    GUEST_WRITES = "a guest writes to it"
    """Nobody else may have it."""
    GUEST_READS = "guests read it"
    """Nobody may write to it; mounts of a read-only filesystem, and nothing else, explain an exclusive hold."""
    HOST = "this host mounts or checks it"
    """No process may write to it; the host's own mounts explain an exclusive hold."""
    FORMAT = "this host makes a filesystem on it"
    """No other process may have it open, and this one only for reading."""
    GIVE_BACK = "it is given back to the driver"
    """No process may write to it."""


@dataclass(frozen=True, slots=True)
class HostState:
    """What this host has of all devices, at one look."""

    opened: Openers
    mounts: tuple[mountinfo.Mount, ...]
    """Those that may be binds of nodes."""
    loops: tuple[tuple[int, str], ...]
    """The numbers of the loop devices that may be upon another device, with their backing files."""


@dataclass(frozen=True, slots=True)
class Users:
    """The users of a device at one moment. `is_held`: the kernel refuses an exclusive open."""

    device: volumes.BlockSource
    is_held: bool
    mounts: tuple[tuple[str, mountinfo.Mount], ...]
    """Of a filesystem on it, or on a device that shares bytes with it; each with a process of its mount namespace."""
    binds: tuple[mountinfo.Mount, ...]
    """Raw publishes: the mounts of its node."""
    openers: tuple[Holder, ...]
    loops: tuple[str, ...]
    """The loop devices upon it."""
    stacked: tuple[str, ...]
    """The devices of LVM, md or multipath upon it."""
    writes_in_flight: int

    def in_the_way_of(self, purpose: Purpose, but: Collection[int] = ()) -> bool:
        """Whether a user forbids the purpose; `but` are processes that may have the device."""
        others = [holder for holder in self.openers if holder.pid not in but]
        writes = any(holder.writes for holder in others)
        if purpose is Purpose.GIVE_BACK:
            return writes
        if purpose is Purpose.FORMAT:
            return writes or self.is_held or any(holder.pid != os.getpid() for holder in others)
        if purpose is Purpose.HOST:
            return writes or (self.is_held and not self.mounts)
        if purpose is Purpose.GUEST_READS:
            can_write = any(mount.filesystem_writes for _, mount in self.mounts)
            can_write = can_write or any(bind.writes_here for bind in self.binds)
            return writes or can_write or (self.is_held and not self.mounts)
        return writes or self.is_held or bool(self.mounts or self.binds or self.stacked)

    def error(self, purpose: Purpose) -> errors.CrustError:
        """The refusal of a purpose, which names the users."""
        if self.mounts and purpose in (Purpose.GUEST_WRITES, Purpose.GUEST_READS):
            return mounted_on_host(self.device.path, self.mounts)
        return self.busy()

    def busy(self) -> DeviceInUse:
        binds = [printable(bind.target) for bind in self.binds]
        places = tuple(dict.fromkeys([*_places(self.mounts), *binds]))
        return DeviceInUse(self.device.path, places, self.loops, self.openers, self.stacked)


def look_at_host(opened: Openers | None = None) -> HostState:
    """For several devices; `opened` is an earlier look at all processes. Raises `OSError`, `NotSeen`. Blocks."""
    opened = openers() if opened is None else opened
    mounts, loops = mountinfo.with_texts(*_LINES), []
    in_memory = [mount for mount in mounts if mount.fs_type in _IN_MEMORY]
    # a text of all pods' mounts, which few nodes need
    all_mounts = functools.cache(mountinfo.read_all)
    for number, backing in loopctl.attached():
        is_near = backing != "/" and any(mount.is_above(backing) for mount in in_memory)
        above = mountinfo.listed_above(backing, all_mounts()) if is_near else None
        if backing == "/" or (above is not None and above.fs_type in _IN_MEMORY):
            loops.append((number, backing))
    return HostState(opened, mounts, tuple(loops))


def of(device: volumes.BlockSource) -> Answer[Users]:
    """The users; absent if the kernel has this device no more. Blocks."""
    return _ask(device, lambda: _of(device, look_at_host))


def check(
    device: volumes.BlockSource,
    purpose: Purpose,
    *,
    but: Collection[int] = (),
    is_mine: bool = False,
    look: Callable[[], HostState] = look_at_host,
    published_below: Collection[str] = ("/",),
) -> None:
    """Return if nobody is in the way of the purpose, or the kernel has the device no more. Blocks.

    It waits within the call for a tool that has the device for a moment, and for writes in flight. `but` are the
    processes that may have the device. `is_mine`: the caller holds the device exclusively, or asks for processes
    alone; then no hold is tested, and mounts and devices upon it, which would hold it too, are not looked for. `look`
    looks, or has looked, after the caller got its lock. `published_below` are the directories in which a CO makes raw
    publishes: elsewhere a driver may bind the node for itself. Raises `NotSeen`, `DeviceMountedOnHost`,
    `DeviceInUse`, `WritesInFlight`.
    """
    is_mine = is_mine or purpose is Purpose.GIVE_BACK
    for pause_s in _PAUSES_S:
        if pause_s:  # a sleep of nothing gives the processor away
            time.sleep(pause_s)
        question = partial(_of, device, look, is_mine=is_mine, published_below=published_below)
        users = answers.seen(_ask(device, question))
        if users is None:
            return
        if not users.in_the_way_of(purpose, but):
            # a reader never waits, and a mounted filesystem writes by itself
            if users.writes_in_flight and not users.mounts and purpose is not Purpose.GUEST_READS:
                check_writes_ended(device)
            return
        refusal, look = users.error(purpose), look_at_host
    raise refusal


def check_writes_ended(device: volumes.BlockSource) -> None:
    """Return once no write to the device is in flight, or the kernel has it no more. Blocks, for two seconds at most.

    Enough for a device whose writer was seen to have ended. Raises `NotSeen`, `WritesInFlight`.
    """
    deadline = time.monotonic() + _FLIGHT_S
    while count := answers.seen(_ask(device, partial(_writes_in_flight, device.identity))):
        if time.monotonic() > deadline:
            raise errors.PeerUnavailable.named(
                "WritesInFlight",
                f"{device.path} is in use",
                why=f"{count} writes of a process that has ended did not end within {_FLIGHT_S:g} s",
            )
        time.sleep(_FLIGHT_PAUSE_S)


def check_mounts_here(device: volumes.BlockSource, *, readonly: bool) -> None:
    """Raise `DeviceMountedOnHost` if this mount namespace has a filesystem of the device mounted: for a guest that
    only reads, a filesystem that can write. Blocks.

    For a repeated publish, whose guest may open the device at this moment. Raises `NotSeen`.
    """
    numbers = _related(device.identity)
    found = answers.seen(_ask(device, lambda: mountinfo.of_devices(numbers))) or ()
    in_the_way = [("self", mount) for mount in found if not readonly or mount.filesystem_writes]
    if in_the_way:
        raise mounted_on_host(device.path, in_the_way)


def is_held(device: volumes.BlockSource) -> bool:
    """Whether the kernel refuses an exclusive open: the device is mounted, part of another, or held by a process.

    False if the kernel has it no more. Raises `NotSeen`.
    """
    return bool(answers.seen(_ask(device, lambda: _is_held(device))))


def in_use(path: str) -> DeviceInUse:
    """The error for a device for which the kernel has answered EBUSY, with the users that can be seen. Blocks."""

    def look() -> Users:
        number = os.stat(path).st_rdev
        identity = device_sets.identity_of(os.major(number), os.minor(number))
        return _of(volumes.BlockSource(path, identity), look_at_host)

    match answers.ask(f"the users of {path}", look, absent=_GONE, needs=NEEDS):
        case answers.Present(users):
            return users.busy()
        case answers.Unseen(error):
            return DeviceInUse(path, unseen=error)
        case answers.Absent():
            return DeviceInUse(path)


def mounted_on_host(path: str, mounts: Collection[tuple[str, mountinfo.Mount]]) -> errors.NotReady:
    """The error about a device that the host has mounted at these places, in the namespaces of these processes."""
    return errors.NotReady.named(
        "DeviceMountedOnHost",
        f"the device {path} cannot be used by a guest",
        why=f"this node has it mounted at {some(_places(mounts))}",
    )


def _places(mounts: Collection[tuple[str, mountinfo.Mount]]) -> list[str]:
    """The number of mount namespaces, then the mount points in those of this process and of the host.

    The text becomes an event of a pod: the mount points and processes of other namespaces are other tenants'.
    """
    own = ("self", hidden.INIT)
    here = sorted({printable(mount.target) for pid, mount in mounts if pid in own})
    others = len({pid for pid, _ in mounts}.difference(own))
    if not others:
        return here
    return [f"a path of {others} other mount namespaces (see /proc/*/mountinfo)", *here]


def _ask(device: volumes.BlockSource, question: Callable[[], T]) -> Answer[T]:
    return answers.ask(f"the users of {device.path}", question, absent=_GONE, needs=NEEDS)


def _of(
    device: volumes.BlockSource,
    look: Callable[[], HostState],
    *,
    is_mine: bool = False,
    published_below: Collection[str] = ("/",),
) -> Users:
    """The users. Raises `OSError`, with an errno of `_GONE` if the device is gone, and `NotSeen`."""
    seen = look()
    identity = device.identity
    _check_present(identity)
    numbers = set(_related(identity))
    loops = _loops_on(numbers, seen)
    for loop in loops:  # a writer to one of them writes to the device
        node = os.stat(loop).st_rdev
        numbers.add((os.major(node), os.minor(node)))
    held = not is_mine and _is_held(device)
    mounts: tuple[tuple[str, mountinfo.Mount], ...] = ()
    stacked: tuple[str, ...] = ()
    if held:
        stacked = tuple(above for number in numbers for above in stacked_on(number))
    if held or (loops and not is_mine):  # a mount holds its device in every namespace
        namespaces = mountinfo.namespaces()
        mounts = tuple((pid, m) for pid in namespaces for m in mountinfo.of_devices(numbers, pid))
    return Users(
        device,
        held,
        mounts,
        tuple(
            bind
            for bind in _binds(device.path, numbers, seen.mounts)
            if any(_is_published(bind.target, root) for root in published_below)
        ),
        tuple(sorted(holder for number in numbers for holder in seen.opened.get(number, ()))),
        tuple(sorted(loops)),
        tuple(sorted(set(stacked))),
        _writes_in_flight(identity),
    )


def _writes_in_flight(identity: volumes.DeviceIdentity) -> int:
    """The second number of `inflight` (Documentation/ABI/stable/sysfs-block)."""
    _check_present(identity)
    directory = f"{device_sets.BY_NUMBER}/{identity.major}:{identity.minor}"
    return int(syscalls.read_attribute(f"{directory}/inflight").split()[1])


def _related(identity: volumes.DeviceIdentity) -> frozenset[Number]:
    """The numbers of the devices that share bytes with this one, and its own."""
    related = device_sets.device_set(identity).related | {identity}
    return frozenset(
        (key.major, key.minor) for key in related if isinstance(key, volumes.DeviceIdentity)
    )


def _check_present(identity: volumes.DeviceIdentity) -> None:
    """Raise an errno of `_GONE` unless the number still is of this device."""
    if device_sets.identity_of(identity.major, identity.minor) != identity:
        raise OSError(errno.ENODEV, "another device has its number")


def _is_held(device: volumes.BlockSource) -> bool:
    number = os.makedev(device.identity.major, device.identity.minor)
    try:
        status = os.stat(device.path)  # before the open, which has effects on a device
        if not stat.S_ISBLK(status.st_mode) or status.st_rdev != number:
            raise OSError(errno.EINVAL, f"{device.path} is not its node")
        os.close(os.open(device.path, os.O_RDONLY | os.O_EXCL | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as err:
        if err.errno == errno.EBUSY:
            return True
        if err.errno in _GONE:
            _check_present(device.identity)
            # the kernel has the device: only its node is missing, so nothing was asked
            why, hint = syscalls.reason(err), "check that this process sees the host's /dev"
            raise NotSeen(f"cannot see the users of {device.path}", why=why, hint=hint) from err
        raise
    return False


def _binds(
    path: str, numbers: Collection[Number], mounts: Sequence[mountinfo.Mount]
) -> Iterator[mountinfo.Mount]:
    """The mounts of nodes of these devices in this namespace, in which a CO makes raw publishes.

    A shim has its driver publish the device of a deferred volume in the same way, at a private path: that is the
    deferred publish itself, for which the proxy reserves the device.
    """
    name = os.path.basename(path)
    for mount in mounts:
        if mount.root == "/" or volumes.is_private(mount.target):
            continue
        # a covered mount is known by the name of its node alone
        is_named = mount.fs_type in _IN_MEMORY and os.path.basename(mount.root) == name
        try:
            device = None if is_named else syscalls.block_device_at(mount.target)
        except OSError as err:
            if err.errno not in syscalls.ABSENT:
                raise
            continue
        if is_named or (device is not None and (os.major(device), os.minor(device)) in numbers):
            yield mount


def _is_published(target: str, root: str) -> bool:
    """Whether a CO may have published at the path. In `plugins` a kubelet's drivers have directories of their own.

    The kernel lists mounts by paths without symbolic links.
    """
    below = os.path.realpath(root).rstrip("/") + "/"
    first, second, *_ = [*target.removeprefix(below).split("/"), ""]
    is_drivers = below != "/" and first == "plugins" and second != "kubernetes.io"
    return target.startswith(below) and not is_drivers


def _loops_on(numbers: Collection[Number], seen: HostState) -> list[str]:
    """The loop devices upon the devices: a kubelet keeps one on each raw volume.

    Nodes of devices are in memory. It opens no loop device of other files: the kernel would ask the file's server,
    which may hang. A node whose bind was detached since (`umount --lazy`, the end of a container) has the path "/":
    it opens such a loop device if that is no larger than the device.
    """
    loops = []
    below = {}
    for major, minor in numbers:
        sectors = syscalls.read_attribute(f"{device_sets.BY_NUMBER}/{major}:{minor}/size")
        below[os.makedev(major, minor)] = int(sectors) * 512
    for number, backing in seen.loops:
        loop, question = f"/dev/loop{number}", partial(_is_upon, number, backing, below)
        answer = answers.ask(f"the device below {loop}", question, absent=_GONE, needs=_NODE)
        if answers.seen(answer):
            loops.append(loop)
    return loops


def _is_upon(number: int, backing: str, sizes_bytes: Mapping[int, int]) -> bool:
    """Whether a loop device is upon one of the devices, by their numbers. Raises `OSError`."""
    # a loop device keeps its size when the device below it grows
    if backing == "/" and loopctl.size_bytes(number) > max(sizes_bytes.values(), default=0):
        return False
    with syscalls.closing(os.open(loopctl.ensure_node(number), os.O_RDONLY)) as fd:
        return loopctl.status(fd).backing_device in sizes_bytes


def stacked_on(
    number: tuple[int, int], *, by_number: str = device_sets.BY_NUMBER
) -> tuple[str, ...]:
    """The names of the devices that hold the device of this number, or a partition of it; () if it is gone.

    Raises `OSError`.
    """
    directory = f"{by_number}/{number[0]}:{number[1]}"
    parts = [
        name
        for name in syscalls.names_in(directory)
        if syscalls.known_attribute(f"{directory}/{name}/partition")
    ]
    places = [f"{directory}/holders", *(f"{directory}/{part}/holders" for part in parts)]
    shown = set()
    for place in places:
        for name in syscalls.names_in(place):
            # of a map also the name that its creator gave it: vg-lv, mpatha
            mapped = syscalls.known_attribute(f"{place}/{name}/dm/name")
            shown.add(f"{name} ({mapped})" if mapped else name)
    return tuple(sorted(shown))
