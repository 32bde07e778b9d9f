"""The filesystem of a volume for a handler whose guests do not make or grow it.

It is made at the publish, before the entry is written.

The decision is the driver's own (`crust.host.filesystems.format_decision`), without a record of the content: the
driver has said that the volume was created empty, and the device must read blank. The proxy clears nothing and adopts
nothing: it refuses the rest of an interrupted mkfs. mkfs has the volume's tool lock and the open device, so it ends
by itself if the proxy is killed; until then nobody publishes, unpublishes or unstages the volume.

A filesystem that is smaller than its device is grown there too, where the volume's class consents: this host's kernel
mounts it at no path (docs/decisions/0046). Any other is published as it is, the volume's condition says so, and its
expansion is refused.
"""

import contextlib
import logging
import os

from crust.core import deferral_keys, errors, volumes
from crust.handoff.record import Record
from crust.host.block import devices, signatures, users
from crust.host.files.locks import ToolLocks
from crust.host.filesystems import format_decision, log_replay, mkfs, superblocks
from crust.host.filesystems.format_decision import Action
from crust.host.mounts import growth
from crust.host.process import syscalls, workers
from crust.proxy import guard

_log = logging.getLogger(__name__)


class Filesystems:
    def __init__(self, locks: ToolLocks) -> None:
        self.locks = locks
        """The locks of the programs that a proxy has started, by the text of a volume's key."""

    async def make_if_blank(
        self,
        key: volumes.VolumeKey,
        source: volumes.BlockSource,
        mount: volumes.DeferredMount,
        guest_format: volumes.GuestFormat,
        guest_kernel: str,
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
            mkfs.check_kernel(mount.fs_type, guest_kernel)
            await workers.run(users.check, source, users.Purpose.FORMAT)
            await mkfs.make(
                source.path,
                mount.fs_type,
                extra_options=mkfs.arguments(mount.fs_type, deferral_keys.of_format(guest_format)),
                inherits=(lock, opened),
            )
        _log.info("filesystem made", extra={"volume": str(key), "device": source.path})

    async def grow(self, record: Record) -> None:
        """Grow the volume's filesystem to its device, if it is smaller. A failure keeps its size, and is logged.

        The caller has reserved the device. Raises `VolumeInUseByTool`.
        """
        await workers.run(self.locks.check_free, str(record.key))
        try:
            if await workers.run(self._grow, record):
                _log.info("filesystem grown", extra={"volume": str(record.key)})
        except errors.CrustError as error:
            extra = {"volume": str(record.key), "error": error}
            _log.warning("the filesystem keeps its old size", extra=extra)

    def _grow(self, record: Record) -> bool:
        """Whether it was smaller. The kernel that grows it holds the device, also after the death of this process."""
        source = record.block
        with syscalls.closing(devices.open_shared(source.path)):
            guard.verify(devices, source)
            if self.not_filled(record, devices.size_bytes(source.path)) is None:
                return False
            users.check(source, users.Purpose.HOST)
            growth.grow_unmounted(source.path, record.mount.fs_type)
            return True

    def not_filled(self, record: Record, size_bytes: int) -> errors.CrustError | None:
        """`FilesystemNotGrown` if growth would change the size of the filesystem, else None. Blocks.

        Its size is read from the superblock: the kernel that has it mounted changes that only when it grows it.
        Raises `superblocks.InvalidSuperblock`.
        """
        fs_type = record.mount.fs_type
        superblock = self.superblock(record.device, fs_type)
        if superblock.size_bytes >= superblock.grown_bytes(size_bytes):
            return None
        return errors.NotReady.named(
            "FilesystemNotGrown",
            f"the filesystem of the volume at {record.target.text} is smaller than its device",
            why=f"it has {superblock.size_bytes} bytes and its device {size_bytes}; runtime handler "
            f"{record.handler!r} does not offer GROW",
        )

    def check_log(self, record: Record) -> None:
        """Raise `LogNotReplayed` for a read-only volume whose guests could not mount it. Blocks."""
        mount = record.mount
        is_known = mount.fs_type in mkfs.SUPPORTED and not mount.needs_secrets
        # a mount that holds it has replayed it
        if record.readonly and is_known and not users.is_held(record.block):
            log_replay.check(str(record.key), record.device, mount.fs_type)

    def superblock(self, device: str, fs_type: str) -> superblocks.Superblock:
        """Raises `superblocks.InvalidSuperblock`. Blocks."""
        return superblocks.read(device, fs_type)


def _judge(key: volumes.VolumeKey, source: volumes.BlockSource, fs_type: str) -> Action:
    """The device is open, so the kernel gives its number and name to no other while this looks."""
    guard.verify(devices, source)
    return format_decision.judge(
        # the driver has created it empty, and crust has no record of it
        format_decision.Content(str(key), in_guest=True),
        fs_type,
        signatures.probe(source.path),
        superblock_of=lambda fs_type: superblocks.find(source.path, fs_type),
    )
