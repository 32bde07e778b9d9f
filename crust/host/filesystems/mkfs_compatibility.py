"""Making filesystems that this kernel mounts.

A mkfs is at times newer than the kernel, as in a container that brings its own, and what it makes by default then
mounts nowhere. So the first filesystem of a kind that a process makes is mounted for a moment where nobody sees it.
If the kernel refuses it, it is made anew with less, and what served is remembered. A kernel that has no such
filesystem at all is not asked: a guest may have it. Where nothing serves, the plain one is left: its mount says why.
"""

import asyncio
import errno
import os
from collections.abc import Sequence

from crust import errors
from crust.host.block import zeroout
from crust.host.filesystems import mkfs
from crust.host.mounts import detached_mount
from crust.host.process import commands

_LESS: dict[str, tuple[tuple[str, ...], ...]] = {
    "ext4": (("-O", "^orphan_file"), ("-O", "^orphan_file,^metadata_csum_seed")),
    "xfs": (
        ("-i", "exchange=0", "-n", "parent=0"),
        ("-i", "exchange=0,nrext64=0", "-n", "parent=0"),
        ("-i", "nrext64=0"),
    ),
    "btrfs": (("-O", "^block-group-tree"), ("-O", "^no-holes"), ("-O", "^block-group-tree,^no-holes")),
}  # fmt: skip
"""Words that take what is new away again. Tools that do not know it do not make it, and are asked the next."""


class MkfsCompatibility:
    """Makes filesystems, and remembers for each kind what this kernel mounts."""

    def __init__(self) -> None:
        self._served: dict[str, tuple[str, ...]] = {}

    async def make(self, path: str, fs_type: str, *, extra_options: Sequence[str] = ()) -> None:
        """`mkfs.make` on a device that is blank and nobody's: it may be made, and cleared, several times."""
        served = self._served.get(fs_type)
        await mkfs.make(path, fs_type, extra_options=(*(served or ()), *extra_options))
        if served is not None or not await self._is_refused(path, fs_type, ()):
            return
        for words in _LESS.get(fs_type, ()):
            await asyncio.to_thread(zeroout.zero_device, path)
            try:
                await mkfs.make(path, fs_type, extra_options=(*words, *extra_options))
            except commands.CommandFailed:
                continue
            if not await self._is_refused(path, fs_type, words):
                return
        await asyncio.to_thread(zeroout.zero_device, path)
        await mkfs.make(path, fs_type, extra_options=extra_options)

    async def _is_refused(self, path: str, fs_type: str, words: tuple[str, ...]) -> bool:
        try:
            os.close(await asyncio.to_thread(detached_mount.open_root, path, fs_type))
        except errors.CrustError as err:
            cause = err.__cause__
            return isinstance(cause, OSError) and cause.errno == errno.EINVAL
        self._served[fs_type] = words
        return False
