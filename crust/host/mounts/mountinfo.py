"""The mounts of this process's mount namespace, as the kernel lists them in /proc/self/mountinfo.

The kernel writes the complete list for each read: 6 ms with 3,000 mounts. statmount(2) reads one mount, but has all
fields of a line only since Linux 6.14, and with few mounts it saves 30 us. crust caches no line: a filesystem that
became read-only by an error changes its line, and no event says so.
"""

import errno
import logging
import os
import re
import select
import stat
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from crust.host import answers
from crust.host.process import hidden, syscalls

_log = logging.getLogger(__name__)

_ESCAPE = re.compile(rb"\\([0-7]{3})")

_ENDED = (errno.ENOENT, errno.ESRCH, errno.EINVAL)
"""The process has ended; EINVAL: it is ending, and has no mount namespace any more."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo (proc_pid_mountinfo(5)).

    `options` belong to the mount, `super_options` to the filesystem: a read-only bind of a writable filesystem has
    "ro" in the first and "rw" in the second. `root` is the part of the filesystem that `target` shows.
    Mounts made below it appear in all of its `peer_group`; those of the group `master` appear below it (0: none).
    """

    mount_id: int
    parent_id: int
    major: int
    minor: int
    root: str
    target: str
    options: tuple[str, ...]
    fs_type: str
    source: str
    super_options: tuple[str, ...]
    peer_group: int = 0
    master: int = 0

    @property
    def writes_here(self) -> bool:
        """Whether a program can write through this mount: neither the mount nor the filesystem is read-only."""
        return "ro" not in self.options and self.filesystem_writes

    @property
    def filesystem_writes(self) -> bool:
        """Whether the filesystem can write to its device, also through another mount, or a detached one."""
        return "ro" not in self.super_options

    def is_above(self, path: str) -> bool:
        """Whether a path, which has no links, is the target or below it."""
        return path == self.target or path.startswith(self.target.rstrip("/") + "/")


def read_all() -> tuple[Mount, ...]:
    """All mounts, in the kernel's order: of two mounts on one target, the later covers the earlier."""
    return parse(listing())


def parse(text: bytes) -> tuple[Mount, ...]:
    """The mounts in a mountinfo text; names of files may hold any byte but NUL, and \\ooo stands for some."""
    return tuple(_parse_line(line) for line in text.split(b"\n") if line)


def at(target: str, listed: Callable[[], bytes] | None = None) -> Mount | None:
    """The topmost mount at `target`; None if it is not a mount point, or absent.

    `listed` is a `listing` that the caller has read for several targets; a mount that it lacks at this path is read
    anew.

    It asks the kernel for the mount id, because a comparison of paths fails twice: a directory above the target may
    be a symbolic link, and mountinfo lists mounts that others have covered. It follows no link at the end. It asks by
    path, because a descriptor, even O_PATH, would make a concurrent unmount fail with EBUSY.
    """
    with syscalls.translating(f"cannot look at {target}"):
        try:
            place = syscalls.mount_at(target)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as err:
            failed = _failed_mount_at(target, err)
            _log.warning(
                "a mounted filesystem answers with errors", extra={"target": target, "error": err}
            )
            return failed
        if not place.is_root:
            return None
        mount = None if listed is None else _of_id(place.mount_id, listed())
        if mount is not None and mount.target == target:
            return mount
        return _of_id(place.mount_id, listing())  # numbers of mounts that ended are given again


def holding(path: str) -> Mount | None:
    """The mount that `path`, which has no links, lies on, or will lie on once it exists.

    It asks the kernel for the mount's id, and compares paths if no file has the path. Raises `NotSeen`.
    """
    answer = answers.ask(
        f"the mount of {path}",
        lambda: syscalls.mount_at(path).mount_id,
        absent=(errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG),
    )
    mount_id = answers.seen(answer)
    return listed_above(path, read_all()) if mount_id is None else _of_id(mount_id, listing())


def listed_above(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The deepest of the mounts above a path, and the topmost of several on one directory."""
    deepest = None
    for mount in mounts:
        if mount.is_above(path) and len(mount.target) >= len(deepest.target if deepest else ""):
            deepest = mount
    return deepest


def _failed_mount_at(target: str, failure: OSError) -> Mount:
    """The mount at a target whose filesystem returns only errors, as xfs does after an I/O error on its device.

    Without it such a volume could never be unmounted. The kernel opens a descriptor of a mount's root without the
    filesystem. Raises the `failure` if it shows none.
    """
    try:
        descriptor = os.open(target, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise failure from None
    with syscalls.closing(descriptor):
        mount = _of_id(mount_id_of("self", str(descriptor)), listing())
        leads_to = os.readlink(f"/proc/self/fd/{descriptor}")
    if mount is None or mount.target != leads_to:
        raise failure
    return mount


def _of_id(mount_id: int, lines: bytes) -> Mount | None:
    """The mount; None if it has gone meanwhile."""
    start = (b"\n" + lines).find(b"\n%d " % mount_id)
    return _parse_line(lines[start : lines.index(b"\n", start)]) if start >= 0 else None


def mount_id_of(pid: str, descriptor: str) -> int:
    """The id of the mount through which a process opened a descriptor (proc_pid_fdinfo(5)); raises `OSError`."""
    with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("mnt_id:")), -1)


class MountWatch:
    """Whether the mounts have changed: the kernel flags an open mountinfo at each change, and no read is needed."""

    def __init__(self) -> None:
        descriptor = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLPRI)

    def has_changed(self) -> bool:
        """Whether the mounts have changed since the last call, or since construction."""
        return bool(self._poll.poll(0))


def of_devices(numbers: Collection[tuple[int, int]], pid: str = "self") -> tuple[Mount, ...]:
    """The mounts of the filesystems on these devices, binds of parts of them included, in the mount namespace of a
    process; none if it has ended.

    Raises `OSError` if the kernel does not show the mounts of a process that runs.
    """
    # A node of many pods has hundreds of lines, so it parses only lines that may name one of the devices.
    fields = (*(b" %d:%d " % number for number in numbers), b" - btrfs ")
    mounts = with_texts(*fields, pid=pid)
    return tuple(mount for mount in mounts if (mount.major, mount.minor) in numbers)


def with_texts(*texts: bytes, pid: str = "self") -> tuple[Mount, ...]:
    """The mounts in whose line one of these texts stands, in the namespace of a process; it parses no other line.

    Raises as `listing`.
    """
    lines = listing(pid).split(b"\n")
    return tuple(_parse_line(line) for line in lines if any(text in line for text in texts))


def namespaces() -> Iterator[str]:
    """A process of each visible mount namespace: "self", then the pids of the others. Raises `OSError`."""
    namespaces_seen = {_namespace_of("self"), ""}
    yield "self"
    for pid in os.listdir("/proc"):
        if pid.isdecimal():
            namespace = _namespace_of(pid)
            if namespace not in namespaces_seen:
                namespaces_seen.add(namespace)
                yield pid


def _namespace_of(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError as err:
        if err.errno in hidden.HIDDEN and hidden.may_hide(pid):
            return ""
        if err.errno not in _ENDED:
            raise
        return ""


def stacked_at(target: str) -> tuple[Mount, ...]:
    """All mounts on the path, the lowest first: a driver may have mounted there more than once.

    By the path itself, which must have no symbolic link: of a covered mount the kernel shows only the path.
    """
    mounts = with_texts(os.fsencode(os.path.basename(target)))
    return tuple(mount for mount in mounts if mount.target == target)


def below(target: str) -> tuple[Mount, ...]:
    """The mounts strictly below the directory `target`."""
    return tuple(m for m in read_all() if m.target.startswith(target.rstrip("/") + "/"))


def listing(pid: str = "self") -> bytes:
    """The list as the kernel writes it; empty if the process has ended. Raises `NotSeen`, for another `OSError`."""
    if pid == "self":
        mounts = answers.ask("the mounts", lambda: syscalls.read_whole("/proc/self/mountinfo"))
        return answers.seen(mounts) or b""
    try:
        return syscalls.read_whole(f"/proc/{pid}/mountinfo")
    except OSError as err:
        if err.errno not in _ENDED:
            raise
        return b""


def _parse_line(line: bytes) -> Mount:
    # Between the sixth field and the lone "-" is any number of optional fields.
    head, _, tail = line.partition(b" - ")
    mount_id, parent_id, device, root, target, options, *optional = head.split(b" ")
    fs_type, source, super_options = [*tail.split(b" "), b"", b""][:3]
    major, minor = map(int, device.split(b":"))
    if fs_type == b"btrfs":
        # It shows a device number of its own, so the number comes from the source that it names. The name is right: a
        # mounted device is open, so its number cannot have been reused. sysfs has it if the node is gone.
        try:
            status = os.stat(_decode(source))
        except FileNotFoundError:
            name = os.path.basename(_decode(source))
            if number := syscalls.known_attribute(f"/sys/class/block/{name}/dev"):
                major, minor = map(int, number.split(":"))
        else:
            if stat.S_ISBLK(status.st_mode):
                major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    return Mount(
        mount_id=int(mount_id),
        parent_id=int(parent_id),
        major=major,
        minor=minor,
        root=_decode(root),
        target=_decode(target),
        options=tuple(_decode(options).split(",")),
        fs_type=_decode(fs_type),
        source=_decode(source),
        super_options=tuple(_decode(super_options).split(",")),
        peer_group=_number(optional, b"shared:"),
        master=_number(optional, b"master:"),
    )


def _number(fields: list[bytes], tag: bytes) -> int:
    return next((int(field[len(tag) :]) for field in fields if field.startswith(tag)), 0)


def _decode(field: bytes) -> str:
    plain = _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field) if b"\\" in field else field
    return os.fsdecode(plain)
