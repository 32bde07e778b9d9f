"""statvfs(3) of a real filesystem."""

import os
from pathlib import Path

import pytest

from crust.host.filesystems import mkfs, usage
from crust.host.mounts import mount_api
from crust.volumes import UsageUnit
from tests.integration.host.conftest import MIB, Attach

pytestmark = pytest.mark.root


async def test_measure_after_a_write_counts_its_bytes_and_inode(
    attach: Attach, mountpoint: str
) -> None:
    device = attach()
    await mkfs.make(device.path, "ext4")
    mount_api.mount_device(device.path, mountpoint, "ext4")
    before = {line.unit: line for line in usage.measure(mountpoint).usage}
    (Path(mountpoint) / "file").write_bytes(b"x" * MIB)
    os.sync()
    after = {line.unit: line for line in usage.measure(mountpoint).usage}
    assert after[UsageUnit.BYTES].used - before[UsageUnit.BYTES].used == MIB
    assert after[UsageUnit.INODES].used - before[UsageUnit.INODES].used == 1
    for line in after.values():
        assert 0 < line.available <= line.total - line.used
