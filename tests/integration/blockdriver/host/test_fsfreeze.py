"""Freezing a filesystem, by the real kernel."""

from pathlib import Path

import pytest

from crust.blockdriver.host import fsfreeze
from crust.core import errors
from crust.host.filesystems import mkfs
from crust.host.mounts import mount_api
from tests.integration.host.conftest import Attach

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


async def test_second_freeze_is_refused_and_no_thaw(attach: Attach, mountpoint: str) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    mount_api.mount_device(device.path, mountpoint, "ext4")
    freeze = fsfreeze.Freeze(mountpoint)
    try:
        with pytest.raises(errors.NotReady, match="frozen already"):
            fsfreeze.Freeze(mountpoint)
    finally:
        freeze.thaw()
    fsfreeze.thaw(mountpoint)
    (Path(mountpoint) / "file").touch()
