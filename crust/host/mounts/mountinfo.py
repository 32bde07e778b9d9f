"""The mounts of this process's mount namespace, as the kernel lists them in /proc/self/mountinfo.

The kernel writes the list whole for each question: 6 ms with 3,000 mounts. From Linux 6.14 on statmount(2) tells all
that a line of the list says of one mount, and costs the same with ten mounts and with ten thousand; an older kernel
lacks the call, or the source. Nothing is cached: a filesystem that became read-only by an error changes its line, and
no event says so.
"""

import ctypes
import logging
import os
import re
import select
import stat
import struct
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from crust.core import errors
from crust.host.process import oserrors, syscalls, sysfs

_log = logging.getLogger(__name__)

_ESCAPE = re.compile(rb"\\([0-7]{3})")


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
    def readonly(self) -> bool:
        """Whether writing through this mount is refused, by the mount or by the filesystem."""
        return "ro" in self.options or "ro" in self.super_options


def read_all() -> tuple[Mount, ...]:
    """All mounts, in the kernel's order: of two mounts on one target, the later one covers the earlier."""
    return parse(_text())


def parse(text: bytes) -> tuple[Mount, ...]:
    """The mounts in a mountinfo text; names of files may hold any byte but NUL, and \\ooo stands for some."""
    return tuple(_parse_line(line) for line in text.split(b"\n") if line)


def at(target: str) -> Mount | None:
    """The topmost mount at `target`; None if it is not a mount point, or absent.

    The kernel is asked for the mount id, because a comparison of paths fails twice: a directory above the target may
    be a symbolic link, and mountinfo lists mounts that others have covered. A link at the end is not followed.
    By path, because a descriptor, even O_PATH, would make a concurrent unmount fail with EBUSY.
    """
    with oserrors.translating(f"cannot look at {target}"):
        try:
            place = syscalls.mount_at(target, unique=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as err:
            found = _failed_mount_at(target)
            if found is None:
                raise
            _log.warning(
                "a mounted filesystem answers with errors", extra={"target": target, "error": err}
            )
            return found
        return _described(target, place) if place.is_root else None


def holding(path: str) -> Mount | None:
    """The mount that `path`, which has no links, lies on, or will lie on once it is made.

    One question to the kernel, whatever the number of mounts. A filesystem that answers with errors is found in the
    list.
    """
    try:
        return _described(path, syscalls.mount_at(path, unique=True))
    except OSError:
        return _listed_above(path)


def _listed_above(path: str) -> Mount | None:
    """The deepest mount above a path, and the topmost of several on one directory."""
    found = None
    for mount in read_all():
        covers = path == mount.target or path.startswith(mount.target.rstrip("/") + "/")
        if covers and (found is None or len(mount.target) >= len(found.target)):
            found = mount
    return found


def _failed_mount_at(target: str) -> Mount | None:
    """The mount at a target whose filesystem returns only errors, as xfs does after an I/O error on its device.

    Without it such a volume could never be unmounted. Opening a descriptor of a mount's root asks nothing of the
    filesystem.
    """
    try:
        descriptor = os.open(target, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        mount = _of_id(mount_id_of("self", str(descriptor)))
        leads_to = os.readlink(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return mount if mount is not None and mount.target == leads_to else None


def _described(path: str, place: syscalls.MountAt) -> Mount | None:
    """The mount that a path lies on; None if it has gone meanwhile."""
    if not place.is_unique:
        return _of_id(place.mount_id)
    return told(place.mount_id) or _of_id(syscalls.mount_at(path).mount_id)


def _of_id(mount_id: int) -> Mount | None:
    text = b"\n" + _text()
    start = text.find(b"\n%d " % mount_id) + 1
    return _parse_line(text[start : text.index(b"\n", start)]) if start else None


def mount_id_of(pid: str, descriptor: str) -> int:
    """The id of the mount through which a process opened a descriptor (proc_pid_fdinfo(5)); raises `OSError`."""
    with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("mnt_id:")), -1)


class Changes:
    """Whether the mounts have changed: the kernel flags an open mountinfo, so that nobody has to read it to know."""

    def __init__(self) -> None:
        descriptor = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLPRI)

    def seen(self) -> bool:
        """Whether they have changed since the last call, or since the beginning."""
        return bool(self._poll.poll(0))


def of_device(major: int, minor: int) -> tuple[Mount, ...]:
    """The mounts of the filesystem on a device, binds of parts of it included, in this namespace."""
    return of_devices({(major, minor)}, "self")


def of_devices(numbers: Collection[tuple[int, int]], pid: str) -> tuple[Mount, ...]:
    """The mounts of the filesystems on these devices in the mount namespace of a process; none if it has ended."""
    # A node of many pods has hundreds of lines, so only those that may be meant are parsed.
    fields = (*(b" %d:%d " % number for number in numbers), b" - btrfs ")
    lines = _text(pid).split(b"\n")
    found = (_parse_line(line) for line in lines if any(field in line for field in fields))
    return tuple(mount for mount in found if (mount.major, mount.minor) in numbers)


def namespaces() -> Iterator[str]:
    """A process of each mount namespace that can be seen: "self", then the pids of the others."""
    seen = {_namespace_of("self"), ""}
    yield "self"
    for pid in os.listdir("/proc"):
        if pid.isdecimal():
            namespace = _namespace_of(pid)
            if namespace not in seen:
                seen.add(namespace)
                yield pid


def _namespace_of(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:  # it has ended
        return ""


def stacked_at(target: str) -> tuple[Mount, ...]:
    """All mounts on the path, the lowest first: a driver may have mounted there more than once.

    By the path itself, which must have no symbolic link: of mounts that others cover, the kernel knows nothing else.
    """
    name = os.fsencode(os.path.basename(target))
    lines = (line for line in _text().split(b"\n") if name in line)
    return tuple(mount for mount in map(_parse_line, lines) if mount.target == target)


def below(target: str) -> tuple[Mount, ...]:
    """The mounts strictly below the directory `target`."""
    return tuple(m for m in read_all() if m.target.startswith(target.rstrip("/") + "/"))


def _text(pid: str = "self") -> bytes:
    try:
        with oserrors.translating("cannot list the mounts"):
            return sysfs.read_bytes(f"/proc/{pid}/mountinfo")
    except (errors.NotFound, OSError):
        if pid == "self":
            raise
        return b""  # it has ended


def _parse_line(line: bytes) -> Mount:
    # Between the sixth field and the lone "-" is any number of optional fields.
    head, _, tail = line.partition(b" - ")
    mount_id, parent_id, device, root, target, options, *optional = head.split(b" ")
    fs_type, source, super_options = [*tail.split(b" "), b"", b""][:3]
    major, _, minor = device.partition(b":")
    numbers = int(major), int(minor)
    if fs_type == b"btrfs":
        numbers = _device_of_btrfs(_decode(source), *numbers)
    return Mount(
        mount_id=int(mount_id),
        parent_id=int(parent_id),
        major=numbers[0],
        minor=numbers[1],
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
    return next((int(each[len(tag) :]) for each in fields if each.startswith(tag)), 0)


def _device_of_btrfs(source: str, major: int, minor: int) -> tuple[int, int]:
    """btrfs shows a device number of its own, so the number comes from the source that it names.

    The name is right: a mounted device is open, so its number cannot have been reused.
    """
    try:
        status = os.stat(source)
    except OSError:
        return major, minor
    if not stat.S_ISBLK(status.st_mode):
        return major, minor
    return os.major(status.st_rdev), os.minor(status.st_rdev)


def _decode(field: bytes) -> str:
    plain = _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field) if b"\\" in field else field
    return _text_of(plain)


def _text_of(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


_ALWAYS_TOLD = 0x01 | 0x02 | 0x08 | 0x10 | 0x20 | 0x200
"""STATMOUNT_SB_BASIC, MNT_BASIC, MNT_ROOT, MNT_POINT, FS_TYPE and SB_SOURCE of linux/mount.h."""
_MNT_OPTS, _FS_SUBTYPE = 0x80, 0x100
_WANTED = _ALWAYS_TOLD | _MNT_OPTS | _FS_SUBTYPE

_REQUEST = struct.Struct("=IIQQ")
"""struct mnt_id_req: its size, unused, the id, the fields that are wanted."""
_ANSWER = struct.Struct("=IIQIIQIIQQIIQQQQQIIQII")
"""The beginning of struct statmount, up to `sb_source`."""
_STRINGS = 512
"""Where its strings begin."""
_BUFFER_BYTES = 16 * 1024

_MOUNT_OPTIONS = (
    (syscalls.MOUNT_ATTR_NOSUID, "nosuid"),
    (syscalls.MOUNT_ATTR_NODEV, "nodev"),
    (syscalls.MOUNT_ATTR_NOEXEC, "noexec"),
)
_ATIME = 0x70
_ATIMES = {0x00: "relatime", 0x10: "noatime"}
_NODIRATIME = 0x80
_IDMAPPED = 0x100000
_NOSYMFOLLOW = 0x200000
_SUPER_OPTIONS = ((1 << 4, "sync"), (1 << 7, "dirsync"), (1 << 25, "lazytime"))


def told(unique_id: int) -> Mount | None:
    """The mount of that id by statmount(2); None if the kernel cannot tell all of it, or it has gone."""
    buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
    try:
        syscalls.statmount(_REQUEST.pack(_REQUEST.size, 0, unique_id, _WANTED), buffer)
    except OSError:  # ENOSYS, a seccomp filter of a container, or ENOENT
        return None
    fields = _ANSWER.unpack_from(buffer)
    _, options, mask, major, minor, _, super_flags, fs_type, _, _, mount_id, parent_id = fields[:12]
    attributes, _, peer_group, master, _, root, target, _, subtype, source = fields[12:]
    if mask & _ALWAYS_TOLD != _ALWAYS_TOLD:
        return None
    data = buffer.raw

    def text(offset: int) -> bytes:
        start = _STRINGS + offset
        return data[start : data.index(b"\0", start)]

    kind = _text_of(text(fs_type))
    shown_source = _text_of(text(source))
    if kind == "btrfs":
        major, minor = _device_of_btrfs(shown_source, major, minor)
    return Mount(
        mount_id=mount_id,
        parent_id=parent_id,
        major=major,
        minor=minor,
        root=_text_of(text(root)),
        target=_text_of(text(target)),
        options=_mount_options(attributes),
        fs_type=f"{kind}.{_text_of(text(subtype))}" if mask & _FS_SUBTYPE else kind,
        source=shown_source,
        super_options=_super_options(super_flags, text(options) if mask & _MNT_OPTS else b""),
        peer_group=peer_group,
        master=master,
    )


def _mount_options(attributes: int) -> tuple[str, ...]:
    found = ["ro" if attributes & syscalls.MOUNT_ATTR_RDONLY else "rw"]
    found += [name for bit, name in _MOUNT_OPTIONS if attributes & bit]
    atime = _ATIMES.get(attributes & _ATIME)
    if atime == "noatime":
        found.append(atime)
    if attributes & _NODIRATIME:
        found.append("nodiratime")
    if atime == "relatime":
        found.append(atime)
    if attributes & _NOSYMFOLLOW:
        found.append("nosymfollow")
    if attributes & _IDMAPPED:
        found.append("idmapped")
    return tuple(found)


def _super_options(flags: int, others: bytes) -> tuple[str, ...]:
    names = ["ro" if flags & 1 else "rw"]
    names += [name for bit, name in _SUPER_OPTIONS if flags & bit]
    return (*names, *(_decode(others).split(",") if others else ()))
