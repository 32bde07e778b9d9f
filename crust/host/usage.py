"""How full a mounted filesystem is."""

import os

from crust import volumes
from crust.host import oserrors


def usage(mountpoint: str) -> volumes.VolumeStats:
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
