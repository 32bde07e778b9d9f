"""Usage and health of a mounted filesystem."""

import os

from crust.core import volumes
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
    # the mount was not requested read-only
    if not mount.filesystem_writes and "ro" not in mount.options:
        return "the kernel made the filesystem read-only, after an error on the device"
    try:
        os.stat(mount.target)
    except OSError as err:  # xfs shows nothing among its options, and every access fails
        return f"the filesystem answers with errors: {os.strerror(err.errno or 0)}"
    return ""
