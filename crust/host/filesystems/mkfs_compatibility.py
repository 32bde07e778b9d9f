"""Making filesystems that this kernel can mount.

A mkfs may be newer than the kernel, as in a container that brings its own, and then makes by default a filesystem
that the kernel cannot mount. So the first filesystem of each kind that this process makes is mounted once, at no
path. If the kernel refuses it, it is made again with fewer features, and the options that worked are remembered. A
kernel that does not know the filesystem at all is no reason: a guest may know it. Where no options work, the default
filesystem is left, and its mount reports the reason.
"""

import errno
import functools
import os
from collections.abc import Callable, Sequence

from crust import errors
from crust.host.block import zeroout
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
        """`mkfs.make` on a blank, unused device, which may be formatted and cleared several times."""
        working = self._working_options.get(fs_type)
        options = (*(working or ()), *extra_options)
        make = functools.partial(
            mkfs.make, path, fs_type, uuid=uuid, is_empty=is_empty, inherits=inherits
        )
        await make(extra_options=options)
        if working is not None or not await self._is_refused(path, fs_type, ()):
            return
        for options in _FEWER_FEATURES.get(fs_type, ()):
            await workers.run(zeroout.zero_device, path)
            try:
                await make(extra_options=(*options, *extra_options))
            except commands.CommandFailed:
                continue
            if not await self._is_refused(path, fs_type, options):
                return
        await workers.run(zeroout.zero_device, path)
        await make(extra_options=extra_options)

    async def _is_refused(self, path: str, fs_type: str, options: tuple[str, ...]) -> bool:
        try:
            await workers.run(_mount_and_unmount, path, fs_type)
        except errors.CrustError as err:
            cause = err.__cause__
            return isinstance(cause, OSError) and cause.errno == errno.EINVAL
        self._working_options[fs_type] = options
        return False


def _mount_and_unmount(path: str, fs_type: str) -> None:
    """The close is the unmount, which writes and waits for the disk: never on the event loop."""
    os.close(detached_mount.open_root(path, fs_type))
