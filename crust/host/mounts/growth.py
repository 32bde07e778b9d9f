"""Growing a filesystem to the size of its device, by one ioctl of the kernel that has it mounted, and no program.

A filesystem that nobody has mounted is mounted at no path meanwhile. The kernel journals the growth; a killed
resize2fs leaves a filesystem that no kernel can mount (docs/decisions/0046).
"""

import errno
import fcntl
import os
import struct

from crust.core import errors
from crust.host.block import devices
from crust.host.filesystems import superblocks
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import syscalls

_EXT4_RESIZE_FS = 0x40086610  # _IOW('f', 16, __u64)
_XFS_FSGEOMETRY_V1 = 0x80705864  # _IOR('X', 100, struct xfs_fsop_geom_v1), 112 bytes
_XFS_GROWFSDATA = 0x4010586E  # _IOW('X', 110, struct xfs_growfs_data)
_BTRFS_RESIZE = 0x50009403  # _IOW(0x94, 3, struct btrfs_ioctl_vol_args)
_BTRFS_ARGUMENTS = struct.Struct("=q4088s")  # a number, then the new size as text
_GEOMETRY_BYTES = 112
_GEOMETRY = struct.Struct("=8IQ")  # block size, …, imaxpct is the eighth; then data blocks
_GROW = struct.Struct("=QI4x")
_CAP_SYS_RESOURCE = 24


class MissingCapability(errors.Refused):
    def __init__(self, what: str) -> None:
        super().__init__(what, why="the kernel requires CAP_SYS_RESOURCE and this process lacks it")


def has_cap_sys_resource() -> bool:
    """Whether growing a mounted ext4 is allowed: EXT4_IOC_RESIZE_FS requires it, xfs and btrfs do not.

    Root in a container or a small VM often lacks it: this check gives a better error than EPERM (capabilities(7)).
    """
    with syscalls.translating("cannot read the capabilities of this process"):
        lines = syscalls.read_whole("/proc/thread-self/status").splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith(b"CapEff:"))
    return bool(mask >> _CAP_SYS_RESOURCE & 1)


def obstacle(fs_type: str) -> str:
    """The reason why this process cannot grow a filesystem of the kind; empty if it can."""
    if fs_type == "ext4" and not has_cap_sys_resource():
        return MissingCapability("a mounted ext4 is not grown").why
    return ""


def grow_mounted(mountpoint: str, fs_type: str) -> None:
    """Grow the filesystem mounted at `mountpoint` to its device's size, if it is smaller. Blocks.

    Raises `FilesystemNotMounted`, `MissingCapability` (ext4 without CAP_SYS_RESOURCE), `Unsupported`,
    `RuntimeFailed`.
    """
    mount = mountinfo.at(mountpoint)
    if mount is None or mount.fs_type != fs_type:
        raise errors.NotReady.named(
            "FilesystemNotMounted", f"no {fs_type} is mounted at {mountpoint}"
        )
    with syscalls.opened(
        mountpoint, f"cannot grow the {fs_type} at {mountpoint}", os.O_DIRECTORY
    ) as fd:
        _grow(fd, fs_type, mount.source)


def grow_unmounted(device: str, fs_type: str) -> None:
    """Grow the filesystem on a device that nothing has mounted; this host's kernel mounts it at no path. Blocks.

    Raises as `grow_mounted` and `mount_api.open_root`; before the mount, `MissingCapability`.
    """
    what = f"cannot grow the {fs_type} on {device}"
    if obstacle(fs_type):
        raise MissingCapability(what)
    with syscalls.translating(what), syscalls.closing(mount_api.open_root(device, fs_type)) as fd:
        _grow(fd, fs_type, device)


def _grow(fd: int, fs_type: str, device: str) -> None:
    action, device_bytes = f"cannot grow the {fs_type} on {device}", devices.size_bytes(device)
    if fs_type == "xfs":
        geometry = fcntl.ioctl(fd, _XFS_FSGEOMETRY_V1, bytes(_GEOMETRY_BYTES))
        block_bytes, *_, inode_percent, blocks = _GEOMETRY.unpack_from(geometry)
        new_blocks = device_bytes // block_bytes
        if new_blocks > blocks:
            fcntl.ioctl(fd, _XFS_GROWFSDATA, _GROW.pack(new_blocks, inode_percent))
        return
    if fs_type == "btrfs":
        syscalls.ioctl(fd, _BTRFS_RESIZE, bytearray(_BTRFS_ARGUMENTS.pack(0, b"max")))
        return
    if fs_type != "ext4":
        raise errors.Unsupported(action, why="crust cannot grow this kind of filesystem")
    # A mounted ext4 keeps its superblock in the device's page cache; statfs(2) leaves out the overhead. Read it
    # first, because the kernel requires the capability even for a resize that changes nothing.
    superblock = superblocks.read_ext4(device)
    blocks = device_bytes // superblock.block_size_bytes
    if blocks <= superblock.blocks:
        return
    try:
        _resize_ext4(fd, blocks)
    except PermissionError as err:
        if has_cap_sys_resource():
            raise
        raise MissingCapability(action) from err
    except OSError as err:
        if err.errno == errno.EBUSY:
            raise errors.OperationPending(
                action, why="another resize is running", hint="retry"
            ) from err
        raise


def _resize_ext4(fd: int, blocks: int) -> None:
    """Resize to `blocks` of the filesystem's own blocks, which are 1 KiB on some small volumes."""
    fcntl.ioctl(fd, _EXT4_RESIZE_FS, struct.pack("=Q", blocks))
