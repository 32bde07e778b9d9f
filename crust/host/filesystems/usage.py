"""How full a mounted filesystem is, and whether it still is one."""

import os

from crust import volumes
from crust.host.mounts.mountinfo import Mount
from crust.host.process import oserrors

_GIVEN_UP = frozenset({"shutdown", "emergency_ro"})
"""What ext4 says of itself among its options, where older kernels said "ro"."""


def measure(mountpoint: str) -> volumes.VolumeStats:
    """Bytes and inodes by statvfs(3). `available` is less than `total - used` by what is reserved for root."""
    with oserrors.translating(f"cannot measure {mountpoint}"):
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


def trouble(mount: Mount) -> str:
    """What is wrong with a mounted filesystem, as far as the kernel says; empty when nothing is."""
    if _GIVEN_UP.intersection(mount.super_options):
        return "the kernel gave the filesystem up, after an error on the device"
    if "ro" in mount.super_options and "ro" not in mount.options:  # nobody asked for it
        return "the kernel made the filesystem read-only, after an error on the device"
    try:
        os.stat(mount.target)
    except OSError as err:  # xfs shows nothing among its options, and answers nothing any more
        return f"the filesystem answers with errors: {os.strerror(err.errno or 0)}"
    return ""
