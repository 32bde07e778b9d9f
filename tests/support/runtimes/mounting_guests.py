"""A guest whose kernel is this host's: it mounts the device of a deferred volume, and freezes it as an agent does."""

import os
from collections.abc import Sequence

from crust.blockdriver.guests import Guests
from crust.blockdriver.host import fsfreeze
from crust.core import volumes
from crust.host.mounts import mount_api
from tests.support import frozen


class MountingGuests(Guests):
    """By target path. What is not in `mounted` was never started."""

    def __init__(self) -> None:
        super().__init__("/run/crust/runtime.sock")
        self.mounted: dict[str, str] = {}

    def start(
        self,
        target: str,
        device: str,
        mountpoint: str,
        fs_type: str = "ext4",
        options: Sequence[str] = (),
    ) -> None:
        """Mount the device that was handed over for `target`."""
        os.makedirs(mountpoint, exist_ok=True)
        mount_api.mount_device(device, mountpoint, fs_type, options)
        self.mounted[target] = mountpoint

    def stop(self, target: str) -> None:
        mount_api.unmount(self.mounted.pop(target))

    async def freeze(self, target: volumes.TargetPath, thaw_after_s: int) -> bool:
        """FIFREEZE; twice is a success."""
        mountpoint = self.mounted.get(target.text)
        if mountpoint is None:
            return False
        frozen.freeze(mountpoint)
        return True

    async def thaw(self, target: volumes.TargetPath) -> bool:
        mountpoint = self.mounted.get(target.text)
        if mountpoint is None:
            return False
        was_frozen = self.is_frozen(target.text)
        fsfreeze.thaw(mountpoint)
        return was_frozen

    async def set_limits(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> bool:
        """No guest of this kind applies limits."""
        return False

    async def close(self) -> None:
        """Nothing to close."""

    def is_frozen(self, target: str) -> bool:
        return frozen.is_frozen(self.mounted[target])
