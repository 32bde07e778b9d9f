"""UUIDs of filesystems that are copies of others: what they need to be mounted beside the original.

ext4 never looks at another's. xfs refuses a second one of the same UUID, unless told not to look (`beside_twin`).
btrfs before Linux 6.7 knows a device by nothing else, and would show the original in the copy's place.

A new UUID wants an empty log: the log's entries carry the old one, and neither xfs_db nor btrfstune can replay them
(btrfstune does not even look, and leaves a filesystem that nothing mounts). Only a mount replays, which the caller
must allow, because what a guest wrote is not mounted on the host for it. Where it may not be, the old UUID stays
until an unmount has emptied the log. It is changed in the superblocks (XFS META_UUID, btrfs metadata_uuid), whatever
the size, and an xfs gets an empty log of the new UUID.

Cut short, both are left so that nothing mounts them, and the same again is no help. So the caller says whether an
earlier try may have been. Then a log of xfs that is torn was empty before, because xfs_db begins with no other, and
is thrown away; one that was zeroed gets the numbers that the metadata ask for, which xfs_repair alone does; and btrfs
loses its mark (`btrfs_uuid`).
"""

import asyncio
import os

from crust import errors
from crust.host.block import devices
from crust.host.filesystems import btrfs_uuid, superblocks
from crust.host.mounts import detached_mount
from crust.host.process import commands, oserrors

_TIMEOUT_S = 600.0
_TORN = b"cannot find log head/tail"
"""What xfs_db says of a log that is neither empty nor to be replayed."""
_TEMPORARY_FSIDS = "/sys/fs/btrfs/features/temp_fsid"


class DuplicateFilesystemUuid(errors.NotReady):
    """A copy that this kernel cannot tell from its original, and that cannot be changed."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the btrfs on {path} cannot be mounted",
            why="it has the UUID of the one that it was copied from, and a log that only a mount replays",
            hint="use Linux 6.7 or later, or copy the volume anew after its last user has unmounted it",
        )
        self.path = path


async def renew(path: str, fs_type: str, *, may_mount: bool, was_begun: bool = False) -> bool:
    """Give the unmounted copy of a filesystem a UUID of its own; whether it needs no `beside_twin` from now on.

    With `may_mount` its log is replayed by a mount that nobody sees. `was_begun`: an earlier try may have been cut
    short, and nobody had the filesystem since. Raises `DuplicateFilesystemUuid`.
    """
    if fs_type == "xfs":
        done = await _renew_xfs(path, was_begun=was_begun)
        return done or (may_mount and await _replayed_xfs(path, was_begun=was_begun))
    if fs_type == "btrfs":
        if was_begun:
            await asyncio.to_thread(btrfs_uuid.settle, path)
        return await _renew_btrfs(path, may_mount=may_mount)
    return True


def beside_twin(fs_type: str, options: tuple[str, ...]) -> tuple[str, ...]:
    """`options` with which a copy mounts while its original, of the same UUID, is mounted."""
    if fs_type == "xfs" and "nouuid" not in options:
        return (*options, "nouuid")
    return options


async def _renew_xfs(path: str, *, was_begun: bool = False) -> bool:
    before = await asyncio.to_thread(superblocks.uuid_of_xfs, path)
    # Its status is 0 as well when it refuses because of the log.
    done = await _fenced("xfs_db", "-x", "-c", "uuid generate", path)
    if was_begun and _TORN in done.stdout:
        await commands.run(["xfs_repair", "-L", path], timeout_s=_TIMEOUT_S)
        await _fenced("xfs_db", "-x", "-c", "uuid generate", path)
    changed = await asyncio.to_thread(superblocks.uuid_of_xfs, path) != before
    if was_begun and changed:
        await commands.run(["xfs_repair", path], timeout_s=_TIMEOUT_S)
    return changed


async def _replayed_xfs(path: str, *, was_begun: bool) -> bool:
    await asyncio.to_thread(_replay, path, "xfs", ("nouuid",))
    return await _renew_xfs(path, was_begun=was_begun)


async def _renew_btrfs(path: str, *, may_mount: bool) -> bool:
    if may_mount and await asyncio.to_thread(superblocks.has_log_of_btrfs, path):
        await asyncio.to_thread(_replay, path, "btrfs", ())
    if await asyncio.to_thread(superblocks.has_log_of_btrfs, path):
        await asyncio.to_thread(_check_told_apart, path)
        return False
    await _fenced("btrfstune", "-f", "-m", path)
    return True


async def _fenced(*argv: str) -> commands.Completed:
    """Run a tool that does not keep others from the device itself: it inherits what does, and may outlive us."""
    fence = await asyncio.to_thread(devices.open_exclusive, argv[-1])
    try:
        return await commands.run(argv, timeout_s=_TIMEOUT_S, inherits=(fence,))
    finally:
        os.close(fence)


def _check_told_apart(path: str) -> None:
    if not os.path.exists(_TEMPORARY_FSIDS):
        raise DuplicateFilesystemUuid(path)


def _replay(path: str, fs_type: str, flags: tuple[str, ...]) -> None:
    root = detached_mount.open_root(path, fs_type, flags)
    with oserrors.translating(f"cannot write back the {fs_type} on {path}"):
        try:
            os.fsync(root)
        finally:
            os.close(root)
