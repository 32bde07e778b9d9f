"""The filesystem of a volume for a handler whose guests do not make or grow it.

It is made at the publish, before the entry is written.

The decision is the driver's own (`crust.host.filesystems.format_decision`), without a record of the content: the
driver has said that the volume was created empty, and the device must read blank. The proxy clears nothing and adopts
nothing: it refuses the rest of an interrupted mkfs. mkfs has the volume's tool lock and the open device, so it ends
by itself if the proxy is killed; until then nobody publishes, unpublishes or unstages the volume.

The proxy grows no filesystem: xfs and btrfs grow only while they are mounted, and after an interrupted resize2fs the
kernel cannot mount it (docs/decisions/0038). The proxy refuses a filesystem that is smaller than its device.
"""

import contextlib
import logging
import os
from dataclasses import dataclass

from crust.core import deferral_keys, errors, volumes
from crust.handoff.record import Record
from crust.host.block import devices, signatures, users
from crust.host.files.locks import ToolLocks
from crust.host.filesystems import format_decision, mkfs, superblocks
from crust.host.filesystems.format_decision import Action
from crust.host.process import workers
from crust.proxy import guard

_TABLES_BYTES = 8 << 20
"""A filesystem may leave so much of its device unused: a last group that would hold little but its own tables."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Unrecorded:
    """The content of a volume that the driver has created empty; crust has no record of it."""

    volume_id: str
    state: str = "new"
    fs_type: str = ""
    planned_uuid: str = ""
    in_guest: bool = True


class Filesystems:
    """Makes the filesystems of volumes."""

    def __init__(self, locks: ToolLocks) -> None:
        self.locks = locks
        """The locks of the programs that a proxy has started, by the text of a volume's key."""

    async def make_if_blank(
        self,
        key: volumes.VolumeKey,
        source: volumes.BlockSource,
        mount: volumes.DeferredMount,
        guest_format: volumes.GuestFormat,
    ) -> None:
        """Make the volume's filesystem if its device is blank; keep a filesystem that exists.

        The caller has reserved the device. Raises `VolumeInUseByTool`, `DeviceNotAsReported`, `holders.DeviceInUse`,
        `ReadOnlyVolumeNotFormatted`, and the errors of `format_decision.judge` and `mkfs.make`.
        """
        with contextlib.ExitStack() as resources:
            lock = await workers.run(resources.enter_context, self.locks.taking(str(key)))
            opened = await workers.run(devices.open_shared, source.path)
            resources.callback(os.close, opened)
            action = await workers.run(_judge, key, source, mount.fs_type)
            if mount.readonly:
                format_decision.check_readable(str(key), action)
            if action is not Action.MAKE:
                await workers.run(devices.sync, source.path)  # an mkfs that ended alone did not
                return
            await workers.run(users.check, source, users.Purpose.FORMAT)
            await mkfs.make(
                source.path,
                mount.fs_type,
                extra_options=mkfs.arguments(mount.fs_type, deferral_keys.of_format(guest_format)),
                inherits=(lock, opened),
            )
        _log.info("filesystem made", extra={"volume": str(key), "device": source.path})

    def check_filled(self, record: Record, size_bytes: int) -> None:
        """Raise `FilesystemNotGrown` if the filesystem is smaller than its device. Blocks.

        Its size is read from the superblock: the kernel that has it mounted changes that only when it grows it.
        """
        fs_type = record.mount.fs_type
        found_bytes = self.filesystem_bytes(record.device, fs_type)
        if size_bytes - found_bytes < _TABLES_BYTES:
            return
        reason = f"{fs_type} grows only while it is mounted"
        if fs_type == "ext4":
            reason = "growing an ext4 that is not mounted destroys it if that is interrupted"
        raise errors.NotReady.named(
            "FilesystemNotGrown",
            f"the filesystem of the volume at {record.target.text} is smaller than its device",
            why=f"it has {found_bytes} bytes and its device {size_bytes}; runtime handler "
            f"{record.handler!r} does not offer GROW, and {reason}",
            hint="delete the pod, and use the volume once in a pod without that runtime: a driver that grows "
            "filesystems does it on the host",
        )

    def filesystem_bytes(self, device: str, fs_type: str) -> int:
        """The bytes of its device that the filesystem uses. Blocks. Raises `superblocks.InvalidSuperblock`."""
        return superblocks.read(device, fs_type).size_bytes


def _judge(key: volumes.VolumeKey, source: volumes.BlockSource, fs_type: str) -> Action:
    """The device is open, so the kernel gives its number and name to no other while this looks."""
    guard.verify(devices, source)
    return format_decision.judge(
        _Unrecorded(str(key)),
        fs_type,
        signatures.probe(source.path),
        superblock_of=lambda fs_type: superblocks.find(source.path, fs_type),
    )
