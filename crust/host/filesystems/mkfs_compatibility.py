"""Making filesystems that this kernel can mount.

A mkfs may be newer than the kernel, as in a container that brings its own, and then makes by default a filesystem
that the kernel cannot mount. So before the first filesystem of each kind, the process makes one on a scratch device
in memory and mounts it, at no path. If the kernel refuses it, fewer features are tried, and the options that worked
are remembered. A volume's own device is formatted once, and never cleared to be formatted again. A kernel that does
not know the filesystem at all is no reason: a guest may know it. Where no options work, the default filesystem is
made, and its mount reports the reason.
"""

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Sequence

from crust import errors
from crust.host.block import loop
from crust.host.filesystems import mkfs
from crust.host.mounts import detached_mount
from crust.host.process import commands, workers

_FEWER_FEATURES: dict[str, tuple[tuple[str, ...], ...]] = {
    "ext4": (("-O", "^orphan_file"), ("-O", "^orphan_file,^metadata_csum_seed")),
    "xfs": (
        ("-i", "exchange=0", "-n", "parent=0"),
        ("-i", "exchange=0,nrext64=0", "-n", "parent=0"),
        ("-i", "nrext64=0"),
    ),
    "btrfs": (("-O", "^block-group-tree"), ("-O", "^no-holes"), ("-O", "^block-group-tree,^no-holes")),
}  # fmt: skip
"""Options that leave new features out. A mkfs that does not know a feature refuses the option; the next one is tried.
"""


class MkfsCompatibility:
    """Makes filesystems, and remembers for each kind the options whose result this kernel mounts."""

    def __init__(self) -> None:
        self._working_options: dict[str, tuple[str, ...]] = {}
        self._one_trial = asyncio.Lock()

    async def make(
        self,
        path: str,
        fs_type: str,
        *,
        uuid: str = "",
        extra_options: Sequence[str] = (),
        is_empty: Callable[[], bool] | None = None,
        inherits: Sequence[int] = (),
    ) -> None:
        """`mkfs.make` on a blank, unused device, with options that leave out what the kernel does not mount."""
        async with self._one_trial:
            if fs_type not in self._working_options:
                self._working_options[fs_type] = await self._find_options(fs_type)
        options = (*self._working_options[fs_type], *extra_options)
        await mkfs.make(
            path, fs_type, uuid=uuid, extra_options=options, is_empty=is_empty, inherits=inherits
        )

    async def _find_options(self, fs_type: str) -> tuple[str, ...]:
        for options in ((), *_FEWER_FEATURES.get(fs_type, ())):
            try:
                if await self._is_mountable(fs_type, options):
                    return options
            except commands.CommandFailed:
                continue  # this mkfs does not know the feature that is left out
        return ()

    async def _is_mountable(self, fs_type: str, options: tuple[str, ...]) -> bool:
        with contextlib.ExitStack() as stack:
            size_bytes = mkfs.minimum_bytes(fs_type)
            device = await workers.run(stack.enter_context, loop.scratch(size_bytes))
            await mkfs.make(device, fs_type, extra_options=options)
            return await workers.run(_is_mounted_at_once, device, fs_type)


def _is_mounted_at_once(path: str, fs_type: str) -> bool:
    """Whether the kernel mounts it; one that does not know the filesystem at all is not asked.

    The close is the unmount, which writes and waits for the disk: never on the event loop.
    """
    try:
        os.close(detached_mount.open_root(path, fs_type))
    except errors.CrustError as err:
        cause = err.__cause__
        return not (isinstance(cause, OSError) and cause.errno == errno.EINVAL)
    return True
