"""The used and the free space of a filesystem."""

import os
from pathlib import Path

import pytest

from crust.blockdriver.host import usage
from crust.core.volumes import UsageUnit
from crust.host.filesystems import mkfs
from crust.host.mounts import mount_api
from tests.integration.host.conftest import MIB, Attach

pytestmark = pytest.mark.root


async def test_measure_counts_bytes_and_inodes(attach: Attach, mountpoint: str) -> None:
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
