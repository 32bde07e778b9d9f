"""Filesystems of one UUID on one host: a clone or a restored snapshot has that of its source, and keeps it.

ext4 ignores duplicate UUIDs. xfs refuses the second mount unless it has `nouuid`, a check that protects nothing
here, because the driver identifies a device by its number. So every xfs is mounted with `nouuid`, in a guest too.
btrfs gives the second one a temporary fsid from Linux 6.7 on; an older kernel treats it as another device of the
first, and there it is refused. No UUID is ever changed: the tools that could would parse what a guest wrote.
"""

import os

from crust import errors
from crust.host.filesystems import superblocks
from crust.host.process import oserrors

_BTRFS = "/sys/fs/btrfs"
_TEMPORARY_FSIDS = "/sys/fs/btrfs/features/temp_fsid"


class DuplicateFilesystemUuid(errors.NotReady):
    """A btrfs whose UUID another mounted one has, on a kernel that cannot keep them apart."""

    def __init__(self, path: str, mounted: str) -> None:
        super().__init__(
            f"the btrfs on {path} cannot be mounted",
            why=f"the one on {mounted} is mounted and has the same UUID; one is a copy of the other",
            hint="unmount that one first, use another node, or Linux 6.7 or later",
        )
        self.path = path


def mount_options(fs_type: str, options: tuple[str, ...]) -> tuple[str, ...]:
    """`options` with which a filesystem mounts while another of the same UUID is mounted."""
    if fs_type == "xfs" and "nouuid" not in options:
        return (*options, "nouuid")
    return options


def check(path: str, fs_type: str) -> None:
    """Raise `DuplicateFilesystemUuid` if the kernel would treat the device as one that is mounted."""
    if fs_type != "btrfs" or os.path.exists(_TEMPORARY_FSIDS):
        return
    devices = _devices_of(superblocks.fsid_of_btrfs(path))
    if devices and os.path.basename(path) not in devices:
        raise DuplicateFilesystemUuid(path, f"/dev/{devices[0]}")


def _devices_of(fsid: str) -> list[str]:
    """The names of the devices of a mounted btrfs."""
    with oserrors.translating(f"cannot look for the btrfs {fsid}"):
        try:
            return os.listdir(f"{_BTRFS}/{fsid}/devices")
        except FileNotFoundError:
            return []
