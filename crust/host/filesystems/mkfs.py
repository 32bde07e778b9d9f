"""Making a filesystem on a device, by its mkfs program.

`make` never overwrites: it looks first, because mkfs.ext4 asks "proceed?" on a terminal only, and without one it
overwrites any content. A caller with a better source may look in its place: an engine knows whether it stores any
data for the device. The caller decides whether a blank device may be formatted, by its own record.

A StorageClass may set the options of mkfs in `_OPTIONS`, with the values listed there; no other parameter reaches a
command line. A key names its filesystem, so that one class can serve several; for a volume of another filesystem it
has no effect. These options come after crust's own, and mkfs uses the last of two.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from crust.core import deferral_keys, errors
from crust.host.block import devices, signatures, users
from crust.host.block.signatures import Blank, Signature
from crust.host.process import commands, syscalls, workers

Row = TypeVar("Row")

SUPPORTED = ("ext4", "xfs", "btrfs")
"""The filesystems that crust makes, checks and grows. `superblocks` and `growth` know each of them too."""

_MIB = 1024 * 1024
_MAKE_TIMEOUT_S = 600.0
_BUSY = re.compile("in use by the system|resource busy")
_BUSY_TRIES = 5
"""The number of tries of mkfs on a device that is held exclusively, before the search for the holder."""


class Table(dict[str, Row]):
    """A row for each filesystem. Raises `UnknownFilesystem` for any other."""

    def __missing__(self, fs_type: str) -> Row:
        raise errors.InvalidRequest.named(
            "UnknownFilesystem",
            f"the filesystem {fs_type!r} is not supported",
            why=f"only {', '.join(SUPPORTED)} are",
        )


@dataclass(frozen=True, slots=True)
class _Mkfs:
    """How one filesystem is made: `command` is the command line up to the device."""

    command: tuple[str, ...]
    minimum_bytes: int
    """The size of the smallest device that `make` accepts."""
    uuid: tuple[str, ...]
    """The option that gives the filesystem a UUID, which is put in place of {}."""
    kernel: tuple[int, int]
    """The oldest Linux that writes a filesystem with these features."""
    later: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = ()
    """The options against features that are younger than Linux 5.15, by the version of mkfs that first has them."""


# Each filesystem has named features: a mkfs newer than the kernel of a node or guest would choose features that this
# kernel does not mount. All are in Linux 5.15, the oldest kernel that crust runs on.

# 4 KiB blocks and 256-byte inodes also on a small volume: mke2fs would choose 1 KiB, and the volume may grow. No
# reserve for root: it would be lost space in a guest. No discard: a fresh device has no data to drop.
_EXT4_FEATURES = (
    "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,"
    "huge_file,dir_nlink,extra_isize,metadata_csum"
)
_MKFS_EXT4 = (
    *("mkfs.ext4", "-q", "-m", "0", "-b", "4096", "-I", "256", "-O", _EXT4_FEATURES),
    *("-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"),
)

# Not -f: mkfs.xfs then refuses by itself a device that is not blank.
_MKFS_XFS = (
    *("mkfs.xfs", "-q", "-K", "-i", "sparse=1"),
    *("-m", "crc=1,finobt=1,rmapbt=0,reflink=1,bigtime=1,inobtcount=1"),
)
_XFS_LATER = (((5, 19), ("-i", "nrext64=0")), ((6, 10), ("-i", "exchange=0", "-n", "parent=0")))

# Not -f, as for xfs. One device holds one copy of the data and two of the metadata, which is mkfs's own choice.
# With -U it searches every block device of /sys for the UUID, as root, in bytes of guests: so it gets an empty /sys.
_MKFS_BTRFS = (
    *("bwrap", "--dev-bind", "/", "/", "--tmpfs", "/sys", "--", "mkfs.btrfs", "-q", "-K"),
    *("-O", "extref,skinny-metadata,no-holes"),
)
_BTRFS_LATER = (((6, 19), ("-O", "^block-group-tree")),)

TABLE = Table(
    ext4=_Mkfs(_MKFS_EXT4, 16 * _MIB, ("-U", "{}"), (3, 18)),
    xfs=_Mkfs(_MKFS_XFS, 300 * _MIB, ("-m", "uuid={}"), (5, 10), _XFS_LATER),
    # the kernel resizes no btrfs to less, nor one that has less (btrfs_ioctl_resize)
    btrfs=_Mkfs(_MKFS_BTRFS, 256 * _MIB, ("-U", "{}"), (4, 9), _BTRFS_LATER),
)
NEWEST = {"xfs": (6, 19), "btrfs": (6, 19)}
"""The newest versions of mkfs whose features are all named here; ext4's begin with none."""


async def make(
    path: str,
    fs_type: str,
    *,
    uuid: str = "",
    extra_options: Sequence[str] = (),
    looks: bool = True,
    inherits: Sequence[int] = (),
) -> None:
    """Make a filesystem on a device without signatures, with a UUID that the caller may choose.

    It probes the device under an exclusive hold, unless the caller has called `check_size` and `check_blank`.
    mkfs has the descriptors `inherits` open.

    Raises `UnknownFilesystem`, `DeviceNotBlank`, `DeviceTooSmallForFilesystem`, `DeviceInUse`,
    `MkfsVersionUnknown`, `CommandFailed`.
    """
    mkfs = TABLE[fs_type]
    if looks:
        await workers.run(_check_device, path, fs_type)
    chosen = [word.format(uuid) for word in mkfs.uuid] if uuid else []
    if mkfs.later:
        asked = await commands.run_command([f"mkfs.{fs_type}", "-V"], timeout_s=_MAKE_TIMEOUT_S)
        version = number_in(said := asked.stdout.decode("utf-8", "replace"))
        if version == (0, 0):
            raise errors.NotReady.named(
                "MkfsVersionUnknown",
                f"{fs_type} is not made on {path}",
                why=f"mkfs.{fs_type} -V names no version, so its features are not known: {said[:128]!r}",
                hint=f"install the mkfs.{fs_type} of the node's distribution",
            )
        chosen += [word for since, words in mkfs.later if version >= since for word in words]
    argv = [*mkfs.command, *chosen, *extra_options, path]
    busy: commands.CommandFailed | None = None
    for _ in range(_BUSY_TRIES):
        try:
            await commands.run_command(argv, timeout_s=_MAKE_TIMEOUT_S, inherits=inherits)
        except commands.CommandFailed as err:
            if not _BUSY.search(err.stderr_tail):
                raise
            # A program that crust starts for another volume has a copy of this hold until it executes.
            busy = err
        else:
            return
    raise await workers.run(users.in_use, path) from busy


def number_in(text: str) -> tuple[int, int]:
    """The first version number in a text; (0, 0) without one."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _check_device(path: str, fs_type: str) -> None:
    check_size(path, fs_type, devices.size_bytes(path))
    # Held exclusively meanwhile, so that no other mkfs is running on it.
    with syscalls.closing(devices.open_exclusive(path)):
        check_blank(path, signatures.probe(path))


def check_size(path: str, fs_type: str, size_bytes: int) -> None:
    """Raise `DeviceTooSmallForFilesystem` unless the filesystem can be made on a device of this size."""
    least_bytes = TABLE[fs_type].minimum_bytes
    if size_bytes < least_bytes:
        raise errors.OutOfRange.named(
            "DeviceTooSmallForFilesystem",
            f"{path} is too small for {fs_type}",
            why=f"it has {size_bytes} bytes and {fs_type} needs {least_bytes}",
        )


def check_kernel(fs_type: str, guest_kernel: str) -> None:
    """Raise `GuestKernelTooOld` if guests with this kernel cannot mount what `make` makes; empty: it is not known."""
    least = TABLE[fs_type].kernel
    if guest_kernel and number_in(guest_kernel) < least:
        raise errors.NotReady.named(
            "GuestKernelTooOld",
            f"{fs_type} is not made for a guest that cannot mount it",
            why=f"its kernel is {guest_kernel}, and this {fs_type} needs Linux {least[0]}.{least[1]}",
        )


def check_blank(path: str, signature: Signature) -> None:
    """Raise `DeviceNotBlank` for a device with data where a superblock could be."""
    if not isinstance(signature, Blank):
        raise errors.Conflict.named(
            "DeviceNotBlank",
            f"{path} is not formatted",
            why=f"there is already {signatures.describe(signature)} on it",
        )


@dataclass(frozen=True, slots=True)
class _Option:
    fs_type: str
    flag: str
    least: int
    most: int


_OPTIONS = {
    deferral_keys.EXT4_BYTES_PER_INODE: _Option("ext4", "-i", 4096, 64 * 1024 * 1024),
    deferral_keys.EXT4_RESERVED_PERCENT: _Option("ext4", "-m", 0, 50),
}

KEYS = tuple(_OPTIONS)
"""The parameters' keys."""


def allowed(key: str, value: str) -> str:
    """The range of `key` of `KEYS`, in words, if `value` is outside of it; empty otherwise."""
    option = _OPTIONS[key]
    plain = value.isascii() and value.isdecimal() and str(int(value)) == value
    if plain and option.least <= int(value) <= option.most:
        return ""
    return f"a number from {option.least} to {option.most}"


def arguments(fs_type: str, parameters: Mapping[str, str]) -> tuple[str, ...]:
    """The options for mkfs of `fs_type` besides crust's own, from checked parameters."""
    chosen: list[str] = []
    for key, option in _OPTIONS.items():
        if key in parameters and option.fs_type == fs_type:
            chosen += [option.flag, parameters[key]]
    return tuple(chosen)
