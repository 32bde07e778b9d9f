"""Usage and health of a mounted filesystem.

Filesystems of one UUID on one host: a clone or a restored snapshot has that of its source, and keeps it.

ext4 ignores duplicate UUIDs. xfs refuses the second mount unless it has `nouuid`, a check that protects nothing
here, because the driver identifies a device by its number. So every xfs is mounted with `nouuid`, in a guest too.
btrfs gives the second one a temporary fsid from Linux 6.7 on; an older kernel treats it as another device of the
first, and there it is refused. No UUID is ever changed: the tools that could would parse what a guest wrote.
"""

import os

from crust.core import errors, volumes
from crust.host.filesystems import superblocks
from crust.host.mounts.mountinfo import Mount
from crust.host.process import syscalls

_SHUT_DOWN = frozenset({"shutdown", "emergency_ro"})
"""Options that ext4 shows after it was shut down by an error; older kernels show "ro"."""


def measure(mountpoint: str) -> volumes.VolumeStats:
    """Bytes and inodes by statvfs(3). `available` is less than `total - used` by the blocks reserved for root."""
    with syscalls.translating(f"cannot measure {mountpoint}"):
        status = os.statvfs(mountpoint)
    unit_bytes = status.f_frsize
    used = (status.f_blocks - status.f_bfree) * unit_bytes
    return volumes.VolumeStats(
        (
            volumes.VolumeUsage(
                volumes.UsageUnit.BYTES,
                status.f_blocks * unit_bytes,
                used,
                status.f_bavail * unit_bytes,
            ),
            volumes.VolumeUsage(
                volumes.UsageUnit.INODES,
                status.f_files,
                status.f_files - status.f_ffree,
                status.f_favail,
            ),
        )
    )


def problem(mount: Mount) -> str:
    """The kernel's report of a problem with a mounted filesystem; empty if there is none."""
    if _SHUT_DOWN.intersection(mount.super_options):
        return "the kernel has shut the filesystem down after an error on the device"
    if (
        "ro" in mount.super_options and "ro" not in mount.options
    ):  # the mount was not requested read-only
        return "the kernel made the filesystem read-only, after an error on the device"
    try:
        os.stat(mount.target)
    except OSError as err:  # xfs shows nothing among its options, and every access fails
        return f"the filesystem answers with errors: {os.strerror(err.errno or 0)}"
    return ""


_BTRFS = "/sys/fs/btrfs"
_TEMPORARY_FSIDS = "/sys/fs/btrfs/features/temp_fsid"


def check(path: str, fs_type: str) -> None:
    """Raise `DuplicateFilesystemUuid` if the kernel would treat the device as one that is mounted."""
    if fs_type != "btrfs" or os.path.exists(_TEMPORARY_FSIDS):
        return
    devices = _devices_of(superblocks.fsid_of_btrfs(path))
    if devices and os.path.basename(path) not in devices:
        raise errors.NotReady.named(
            "DuplicateFilesystemUuid",
            f"the btrfs on {path} cannot be mounted",
            why=(
                f"the one on /dev/{devices[0]} is mounted and has the same UUID; one is a "
                "copy of the other"
            ),
            hint="unmount that one first, use another node, or Linux 6.7 or later",
        )


def _devices_of(fsid: str) -> list[str]:
    """The names of the devices of a mounted btrfs."""
    with syscalls.translating(f"cannot look for the btrfs {fsid}"):
        try:
            return os.listdir(f"{_BTRFS}/{fsid}/devices")
        except FileNotFoundError:
            return []
