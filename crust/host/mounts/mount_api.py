"""Mounting and unmounting, by the new mount API (fsopen(2) and others, Linux 5.12 and later).

Two reasons against mount(2): the kernel's log of the context gives the reason as text ("ext4: Unknown parameter
'bogus'"), and a mount is built detached and then attached atomically: no mount is ever visible without its options.

No function follows a symbolic link at the end of a target, and none detaches lazily: a lazy unmount of a busy volume
reports success while a writer goes on writing.

Two filesystems on one host may have one UUID: a clone or a restored snapshot keeps the UUID of its source. ext4
ignores that. xfs refuses the second mount unless it has `nouuid`; this check protects nothing here, because the
driver identifies a device by its number; so crust mounts every xfs with `nouuid`, in a guest too. btrfs gives the
second filesystem a temporary fsid from Linux 6.7 on; an older kernel treats it as another device of the first, and
there crust refuses it. crust changes no UUID: the tools for it would parse bytes of a guest.
"""

import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from crust.core import errors
from crust.host import answers
from crust.host.block import users
from crust.host.files import listing
from crust.host.filesystems import superblocks
from crust.host.mounts import mount_options, mount_users, mountinfo
from crust.host.mounts.mount_options import InvalidMountOption, Parameters
from crust.host.mounts.mountinfo import Mount
from crust.host.process import syscalls

GUARD_SOURCE = "crust-deferred"
GUARD_FILLER = ".crust-guard"
_GUARD_INODES = 1024
_GUARD_SEALED_INODES = 2
_GUARD_MARK = "trusted.crust"
_KERNEL_HINT = "use Linux 5.12 or later, and allow the mount syscalls in the seccomp profile"
_STACK_MAX = 64
_LOOKS_MAX = 4
_BTRFS = "/sys/fs/btrfs"
_TEMPORARY_FSIDS = "/sys/fs/btrfs/features/temp_fsid"
_INVALID = {
    # xfs gives its reasons to the kernel log alone.
    "xfs": "there is no valid xfs on it, or one of the same UUID is mounted (a clone: use the option nouuid)"
}


def mount_device(  # noqa: PLR0913 - a publish decides each separately
    device: str,
    target: str,
    fs_type: str,
    options: Sequence[str] = (),
    *,
    readonly: bool = False,
    beside_writers: bool = False,
    untrusted: bool = False,
) -> None:
    """Mount the filesystem on a block device at the directory `target`.

    With `beside_writers` a read-only mount leaves the filesystem itself writable: the kernel keeps one instance per
    device, and could not mount a read-only instance writable elsewhere at the same time. With `untrusted`, for a
    filesystem that a guest or a pod may have written, its set-user-ID programs and device nodes have no effect.

    Raises `InvalidMountOption`, `DeviceInUse`, `InvalidMountTarget`, `Corrupt` (the kernel finds damage),
    `MountFailed`, `DuplicateFilesystemUuid`.
    """
    attributes, parameters = mount_options.for_kernel(fs_type, options, untrusted=untrusted)
    if readonly:
        attributes |= syscalls.MOUNT_ATTR_RDONLY
        parameters = parameters if beside_writers else (("ro", None), *parameters)
    with (
        _target(target, directory=True) as onto,
        _mounted(device, fs_type, f"on {target}", parameters, attributes) as mount,
        syscalls.translating(f"cannot mount on {target}"),
    ):
        # a detached mount vanishes with its last descriptor: an error leaves nothing to undo
        syscalls.move_mount(mount, onto)


def open_root(device: str, fs_type: str) -> int:
    """A descriptor of the root of a filesystem that is mounted at no path, and unmounted when it is closed.

    Its options are those of an untrusted filesystem. Raises `DeviceInUse`, `DuplicateFilesystemUuid`.
    """
    options = ("nouuid",) if fs_type == "xfs" else ()
    attributes, parameters = mount_options.for_kernel(fs_type, options, untrusted=True)
    with _mounted(device, fs_type, "at no path", parameters, attributes) as mount:
        # The mount's own descriptor is an O_PATH one, which takes no ioctl.
        return os.open(f"/proc/self/fd/{mount}", os.O_RDONLY | os.O_DIRECTORY)


def bind(source: str, target: str) -> None:
    """Bind `source` (a directory, a file or a device node) to `target`, which is of the same kind.

    Mounts below `source` are not included. No bind of a device *node* stops writes to the device: use
    `devices.set_readonly`.
    """
    action = f"cannot bind {source} to {target}"
    with syscalls.translating(action, hint=""):
        directory = stat.S_ISDIR(os.stat(source).st_mode)
    with (
        _target(target, directory=directory) as onto,
        syscalls.translating(action),
        syscalls.closing(syscalls.open_tree(source)) as mount,
    ):
        syscalls.move_mount(mount, onto)


def mount_guard(target: str, *, names: bool = False, group: int | None = None) -> None:
    """Mount the fail-closed tmpfs on the directory `target`: it takes an owner, a mode and a security label, no data,
    and names only with `names`.

    A runtime that misses a deferral writes nothing onto the node's disk: every write of data gets ENOSPC, and without
    `names` every new name does. With `names` a kubelet creates the directories of a `subPath` in the target. The
    guard is full, and the root has its `group`, before the mount is attached: no guard is ever visible without them.
    """
    parameters = (
        ("size", "4k"),  # the kernel makes it one page
        ("nr_inodes", f"{_GUARD_INODES if names else _GUARD_SEALED_INODES}"),
        ("mode", "0755"),
        ("gid", f"{group or 0}"),
    )
    attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOEXEC
    with (
        _target(target, directory=True) as onto,
        syscalls.translating(f"cannot make a guard mount on {target}"),
    ):
        with _context("tmpfs") as context:
            _configure(context, GUARD_SOURCE, "tmpfs", parameters)
            mount = syscalls.fsmount(context, attributes)
        with syscalls.closing(mount):
            if names or not _is_sealed(mount):
                # a file of root fills the only page, and takes an inode too
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with syscalls.closing(os.open(GUARD_FILLER, flags, 0o400, dir_fd=mount)) as filler:
                    os.write(filler, bytes(mmap.PAGESIZE))
            syscalls.move_mount(mount, onto)


def takes_names(guard: str) -> bool:
    """Whether the guard mount at this path was made with `names`."""
    return os.statvfs(guard).f_files > _GUARD_SEALED_INODES


def _is_sealed(mount: int) -> bool:
    """Whether a guard of two inodes has none left, once its root has a small attribute.

    Since Linux 6.6 a tmpfs counts extended attributes as parts of an inode: the mark leaves too little of the second
    inode for a name, and enough for the security label that a container engine gives to the root. Earlier kernels,
    and kernels without attributes on a tmpfs, do not count a label, and a file has to take the inode.
    """
    try:
        os.setxattr(f"/proc/self/fd/{mount}", _GUARD_MARK, b"1")
    except OSError as err:
        if err.errno != errno.EOPNOTSUPP:
            raise
    return os.fstatvfs(mount).f_ffree == 0


def is_guard(mount: Mount) -> bool:
    return mount.fs_type == "tmpfs" and mount.source == GUARD_SOURCE


def unmount(target: str) -> None:
    """Remove every mount stacked at `target`; not mounted, or absent, is a success.

    Raises `DeviceInUse`, which names the processes and mounts that use it. Never lazy.
    """
    for _ in range(_STACK_MAX):
        if not unmount_one(target):
            return


def unmount_one(target: str, *, parent: int | None = None) -> bool:
    """Remove the topmost mount at `target`; False if there is none. Raises as `unmount` does.

    With a descriptor of the target's directory, `parent`, only the last name is looked up: no component above can be
    exchanged for a link meanwhile. A descriptor of the mount itself would keep it busy.
    """
    path = target if parent is None else f"/proc/self/fd/{parent}/{os.path.basename(target)}"
    for look in range(_LOOKS_MAX):
        try:
            syscalls.umount(path)
        except OSError as err:
            if err.errno in (errno.ENOENT, errno.ENOTDIR):
                return False
            # EINVAL: not a mountpoint, or a mount that is locked because it came from a more privileged namespace
            if err.errno == errno.EINVAL and mountinfo.at(target) is None:
                return False
            if err.errno != errno.EBUSY:
                raise syscalls.translate(err, f"cannot unmount {target}") from err
            # A kubelet's or an agent's stat of the path keeps the mount busy for a moment: that is the reason if the
            # search for holders, which takes milliseconds, finds none.
            busy = mount_users.in_use(target)
            if busy.is_explained or look == _LOOKS_MAX - 1:
                raise busy from err
        else:
            return True
    return False


@contextmanager
def _target(target: str, *, directory: bool) -> Iterator[int]:
    """A descriptor of the target: the mount goes onto this inode, even after a rename."""
    with syscalls.translating(f"cannot mount on {target}"):
        onto = os.open(target, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    with syscalls.closing(onto):
        mode = os.fstat(onto).st_mode
        why = "it is not a directory" if directory else "it is a directory"
        if stat.S_ISLNK(mode):
            why = "it is a symbolic link"
        if stat.S_ISLNK(mode) or directory != stat.S_ISDIR(mode):
            raise errors.Refused.named("InvalidMountTarget", f"cannot mount on {target}", why=why)
        yield onto


@contextmanager
def _context(fs_type: str) -> Iterator[int]:
    try:
        context = syscalls.fsopen(fs_type)
    except OSError as err:
        if err.errno == errno.ENODEV:
            raise errors.Unsupported(
                f"this kernel cannot mount {fs_type}",
                why="it has no such filesystem",
                hint="load its module",
            ) from err
        raise syscalls.translate(err, "cannot open a mount context", hint=_KERNEL_HINT) from err
    with syscalls.closing(context):
        yield context


@contextmanager
def _mounted(
    device: str, fs_type: str, place: str, parameters: Parameters = (), attributes: int = 0
) -> Iterator[int]:
    """A detached mount of the filesystem on a device. Raises `DuplicateFilesystemUuid` where the kernel would take it
    for a part of a mounted one.
    """
    if fs_type == "btrfs" and not listing.exists(_TEMPORARY_FSIDS):
        fsid, parts = superblocks.fsid_of_btrfs(device), list[str]()
        with syscalls.translating(f"cannot look for the btrfs {fsid}"), suppress(FileNotFoundError):
            parts = os.listdir(f"{_BTRFS}/{fsid}/devices")
        if parts and os.path.basename(device) not in parts:
            raise errors.NotReady.named(
                "DuplicateFilesystemUuid",
                f"the btrfs on {device} cannot be mounted",
                why=f"the one on /dev/{parts[0]} is mounted and has the same UUID; one is a copy of the other",
            )
    with _context(fs_type) as context:
        try:
            _configure(context, device, fs_type, parameters)
            mount = syscalls.fsmount(context, attributes)
        except OSError as err:
            action, log = f"cannot mount {device} as {fs_type} {place}", _kernel_log(context)
            if err.errno == errno.EBUSY:
                raise users.in_use(device) from err
            if err.errno == errno.EINVAL:
                raise errors.RuntimeFailed.named(
                    "MountFailed",
                    action,
                    why=log or _INVALID.get(fs_type, f"there is no valid {fs_type} on it"),
                ) from err
            error = syscalls.translate(err, action)
            if log:
                error.why = f"{log}; {error.why}"
            raise error from err
        with syscalls.closing(mount):
            yield mount


def _configure(context: int, source: str, fs_type: str, parameters: Parameters) -> None:
    syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, "source", source)
    for key, value in parameters:
        command = syscalls.FSCONFIG_SET_FLAG if value is None else syscalls.FSCONFIG_SET_STRING
        try:
            syscalls.fsconfig(context, command, key, value)
        except OSError as err:
            reason = _kernel_log(context) or f"{key!r}: {syscalls.reason(err)}"
            raise InvalidMountOption(fs_type, reason) from err
    syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE)


def _kernel_log(context: int) -> str:
    """The messages of the context, "e ext4: Unknown parameter 'x'", one per read(2) until ENODATA."""
    lines: list[str] = []
    while True:
        match answers.ask("the log", lambda: os.read(context, 8192), absent=(errno.ENODATA,)):
            case answers.Present(line):
                text = line.decode("utf-8", "replace").strip()
                lines.append(text.removeprefix("e ").removeprefix("w "))
            case _:
                return "; ".join(lines)
