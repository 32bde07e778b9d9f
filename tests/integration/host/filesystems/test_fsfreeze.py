"""FIFREEZE and FITHAW of a real filesystem."""

from pathlib import Path

import pytest

from crust import errors
from crust.host.filesystems import fsfreeze, mkfs
from crust.host.mounts import mount_api
from tests.integration.host.conftest import Attach

pytestmark = pytest.mark.root


async def test_freeze_twice_is_refused_and_thaw_twice_succeeds(
    attach: Attach, mountpoint: str
) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    mount_api.mount_device(device.path, mountpoint, "ext4")
    fsfreeze.freeze(mountpoint)
    try:
        with pytest.raises(errors.NotReady, match="frozen already"):
            fsfreeze.freeze(mountpoint)
    finally:
        fsfreeze.thaw(mountpoint)
    fsfreeze.thaw(mountpoint)
    (Path(mountpoint) / "file").touch()
