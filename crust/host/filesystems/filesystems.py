"""Filesystems: make, check, grow, measure, freeze. One row of a table per filesystem that crust serves.

`make` never overwrites: it looks first, because mkfs.ext4 asks "proceed?" of a terminal only, and without one it
formats over whatever is there. Whether a blank device may be formatted at all is the caller's to know (its own
record, and `devices.is_blank`).

A hostile filesystem meets the kernel's parser only when it is mounted; everything before that reads superblocks.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from crust import errors
from crust.host.block import devices, holders, signatures
from crust.host.block.signatures import (
    AmbivalentSignature,
    Blank,
    Filesystem,
    Other,
    Signature,
    probe,
)
from crust.host.filesystems import growth, superblocks
from crust.host.filesystems.freeze import Freeze, freeze, thaw, thaw_unmounted
from crust.host.filesystems.growth import MissingCapability, OnlyGrowsMounted, grow_mounted
from crust.host.filesystems.usage import usage
from crust.host.process import commands

__all__ = [
    "SUPPORTED",
    "AmbivalentSignature",
    "Blank",
    "CannotCheck",
    "Filesystem",
    "Freeze",
    "MissingCapability",
    "NeedsRepair",
    "NotBlank",
    "OnlyGrowsMounted",
    "Other",
    "Signature",
    "TooSmall",
    "UnknownFilesystem",
    "check",
    "freeze",
    "grow_mounted",
    "grow_unmounted",
    "is_supported",
    "make",
    "minimum_bytes",
    "needs_growth",
    "probe",
    "superblock",
    "thaw",
    "thaw_unmounted",
    "usage",
]

_MIB = 1024 * 1024
_MAKE_TIMEOUT_S = 600.0
_CHECK_TIMEOUT_S = 3600.0
_E2FSCK_UNCORRECTED, _E2FSCK_FAILED = 4, 8
_SAID_BYTES = 1024


class UnknownFilesystem(errors.InvalidRequest):
    """A filesystem that crust does not serve."""

    def __init__(self, fs_type: str) -> None:
        super().__init__(
            f"the filesystem {fs_type!r} is not served",
            why=f"only {', '.join(SUPPORTED)} are",
            hint="correct fsType of the StorageClass",
        )
        self.fs_type = fs_type


class NotBlank(errors.Conflict):
    """A device that was to be formatted carries something."""

    def __init__(self, path: str, found: Signature) -> None:
        what = found.type if isinstance(found, Filesystem) else getattr(found, "what", "something")
        super().__init__(
            f"{path} is not formatted",
            why=f"there is already {what} on it",
            hint="look whose data it is; wipe it by hand if it is nobody's",
        )
        self.path = path
        self.found = found


class TooSmall(errors.OutOfRange):
    """A device on which the filesystem does not fit."""

    def __init__(self, path: str, fs_type: str, size_bytes: int, minimum_bytes: int) -> None:
        super().__init__(
            f"{path} is too small for {fs_type}",
            why=f"it has {size_bytes} bytes and {fs_type} needs {minimum_bytes}",
            hint="ask for a larger volume or another filesystem",
        )
        self.path = path
        self.size_bytes = size_bytes
        self.minimum_bytes = minimum_bytes


class NeedsRepair(errors.Corrupt):
    """A filesystem whose damage a program must not mend alone."""

    def __init__(self, path: str, fs_type: str, tail: str) -> None:
        super().__init__(
            f"the {fs_type} on {path} is damaged",
            why=tail.strip() or "its check found errors that it does not correct unasked",
            hint="take a copy, then repair it by hand",
        )
        self.path = path
        self.fs_type = fs_type


class CannotCheck(errors.Corrupt):
    """A filesystem that its own check could not read to the end."""

    def __init__(self, path: str, fs_type: str, said: str) -> None:
        super().__init__(
            f"the {fs_type} on {path} cannot be checked",
            why=said.strip() or "its check gave up",
            hint="look whether the device can be read, or newer tools know the filesystem; nothing mounts it",
        )
        self.path = path
        self.fs_type = fs_type


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one filesystem is served. `make` is the command up to the device."""

    make: tuple[str, ...]
    make_zeroed: tuple[str, ...]
    minimum_bytes: int
    superblock: Callable[[str], superblocks.Superblock]
    check: Callable[[str], Awaitable[bool]]
    grow_unmounted: Callable[[str], Awaitable[None]]


async def make(
    path: str, fs_type: str, *, extra_options: Sequence[str] = (), zeroed: bool = False
) -> None:
    """Put a new filesystem onto a device without signatures.

    `zeroed` says that the whole device reads as zeros, a new sparse file, say: ext4 then believes its inode tables
    to be zeroed, instead of having the kernel that first mounts it write them all.

    Raises `UnknownFilesystem`, `NotBlank`, `TooSmall`, `DeviceInUse`, `AmbivalentSignature`, `CommandFailed`.
    """
    kind = _kind(fs_type)
    await asyncio.to_thread(_check_formattable, path, fs_type, kind.minimum_bytes)
    argv = [*(kind.make_zeroed if zeroed else kind.make), *extra_options, path]
    await commands.run(argv, timeout_s=_MAKE_TIMEOUT_S)


async def check(path: str, fs_type: str) -> bool:
    """Make an unmounted filesystem fit to be mounted writable; whether anything was mended.

    ext4: `e2fsck -p` unless the superblock says clean. xfs and btrfs: nothing, their mount replays the log, and
    xfs_repair refuses a log that is not replayed. Raises `NeedsRepair` and `CannotCheck`, after which nothing may
    mount it writable.
    """
    return await _kind(fs_type).check(path)


async def grow_unmounted(path: str, fs_type: str) -> None:
    """Grow a filesystem that is not mounted to the size of its device; raises `OnlyGrowsMounted` for xfs, btrfs."""
    await _kind(fs_type).grow_unmounted(path)


def needs_growth(path: str, fs_type: str) -> bool:
    """Whether an unmounted filesystem leaves at least one block of its device unused."""
    found = _kind(fs_type).superblock(path)
    return devices.size_bytes(path) - found.size_bytes >= found.block_size_bytes


def superblock(path: str, fs_type: str) -> superblocks.Superblock | None:
    """The superblock on the device, None if it is not that of the filesystem: one read, where `probe` makes many.

    For a device that the caller's own record vouches for; what is on any other one, `probe` must say. If it is
    `clean`, `check` would find nothing to do.
    """
    try:
        return _kind(fs_type).superblock(path)
    except superblocks.BadSuperblock:
        return None


def is_supported(fs_type: str) -> bool:
    """Whether crust serves this filesystem."""
    return fs_type in _KINDS


def minimum_bytes(fs_type: str) -> int:
    """The size of the smallest device that `make` takes for this filesystem."""
    return _kind(fs_type).minimum_bytes


def _kind(fs_type: str) -> _Kind:
    try:
        return _KINDS[fs_type]
    except KeyError:
        raise UnknownFilesystem(fs_type) from None


def _check_formattable(path: str, fs_type: str, least_bytes: int) -> None:
    size_bytes = devices.size_bytes(path)
    if size_bytes < least_bytes:
        raise TooSmall(path, fs_type, size_bytes, least_bytes)
    # Held exclusively while we look, so that nobody is half through formatting it.
    fence = devices.open_exclusive(path)
    try:
        found = signatures.probe(path)
    finally:
        os.close(fence)
    if not isinstance(found, Blank):
        raise NotBlank(path, found)


async def _check_ext4(path: str) -> bool:
    if (await asyncio.to_thread(superblocks.read_ext4, path)).clean:
        return False
    return await _e2fsck(path, "-p")


async def _e2fsck(path: str, *flags: str) -> bool:
    # Of the status, bit 1 is "corrected" and bit 4 "left as it is"; from 8 on e2fsck itself failed, and that is
    # not "clean". fsck(8)'s callers often read it so.
    try:
        done = await commands.run(
            ["e2fsck", *flags, path], timeout_s=_CHECK_TIMEOUT_S, ok=range(_E2FSCK_FAILED)
        )
    except commands.CommandFailed as err:
        if await asyncio.to_thread(holders.is_exclusively_held, path):
            raise await asyncio.to_thread(holders.device_in_use, path) from err
        if err.code == _E2FSCK_FAILED:
            raise CannotCheck(path, "ext4", err.stderr_tail[-_SAID_BYTES:]) from err
        raise
    if done.code & _E2FSCK_UNCORRECTED:
        raise NeedsRepair(path, "ext4", done.stdout[-_SAID_BYTES:].decode("utf-8", "replace"))
    return done.code != 0


async def _check_xfs(path: str) -> bool:
    await asyncio.to_thread(superblocks.read_xfs, path)
    return False


async def _grow_ext4(path: str) -> None:
    # With -f, e2fsck takes a device whose every mount is read-only for its own, and writes under the kernel's feet.
    os.close(await asyncio.to_thread(devices.open_exclusive, path))
    # resize2fs refuses a filesystem that was mounted since its last full check.
    await _e2fsck(path, "-f", "-p")
    await commands.run(["resize2fs", path], timeout_s=_CHECK_TIMEOUT_S)


async def _refuse_to_grow_xfs(path: str) -> None:
    raise growth.OnlyGrowsMounted(path, "xfs")


async def _check_btrfs(path: str) -> bool:
    await asyncio.to_thread(superblocks.read_btrfs, path)
    return False


async def _refuse_to_grow_btrfs(path: str) -> None:
    raise growth.OnlyGrowsMounted(path, "btrfs")


# 4 KiB blocks and 256-byte inodes also on a small volume: mke2fs would choose 1 KiB, and the volume may grow. No
# reserve for root: it would be lost space in a guest. No discard: a fresh device has nothing to forget.
_MKFS_EXT4 = ("mkfs.ext4", "-q", "-m", "0", "-b", "4096", "-I", "256", "-E")

# Not -f: mkfs.xfs then refuses by itself what is not blank.
_MKFS_XFS = ("mkfs.xfs", "-q", "-K")

# Not -f, as for xfs. One device holds one copy of the data and two of the metadata, which is mkfs's own choice.
_MKFS_BTRFS = ("mkfs.btrfs", "-q", "-K")

_KINDS: dict[str, _Kind] = {
    "ext4": _Kind(
        make=(*_MKFS_EXT4, "nodiscard,lazy_itable_init=1,lazy_journal_init=1"),
        make_zeroed=(*_MKFS_EXT4, "nodiscard,assume_storage_prezeroed=1"),
        minimum_bytes=16 * _MIB,
        superblock=superblocks.read_ext4,
        check=_check_ext4,
        grow_unmounted=_grow_ext4,
    ),
    "xfs": _Kind(
        make=_MKFS_XFS,
        make_zeroed=_MKFS_XFS,
        minimum_bytes=300 * _MIB,
        superblock=superblocks.read_xfs,
        check=_check_xfs,
        grow_unmounted=_refuse_to_grow_xfs,
    ),
    "btrfs": _Kind(
        make=_MKFS_BTRFS,
        make_zeroed=_MKFS_BTRFS,
        minimum_bytes=128 * _MIB,
        superblock=superblocks.read_btrfs,
        check=_check_btrfs,
        grow_unmounted=_refuse_to_grow_btrfs,
    ),
}

SUPPORTED: tuple[str, ...] = tuple(_KINDS)
"""The filesystems that crust makes, checks and grows."""
