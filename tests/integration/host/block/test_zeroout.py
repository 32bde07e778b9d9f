"""Zeroing a device: all of it, and only while it is not in use."""

import os
from pathlib import Path

import pytest

from crust.host.block import devices, loop
from tests.support.faults.syncs import recorded

pytestmark = pytest.mark.root


def test_zero_device_reads_as_zeros_and_frees_its_space(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(os.urandom(8 << 20))
    device = loop.attach(str(image))
    try:
        hold = devices.open_exclusive(device.path)
        with pytest.raises(devices.DeviceInUse):
            devices.zero_device(device.path)
        os.close(hold)
        assert not devices.is_blank(device.path)
        with recorded() as steps:
            devices.zero_device(device.path)
        assert steps == [("sync", device.path)]
        assert Path(device.path).read_bytes().count(0) == 8 << 20
    finally:
        loop.detach(device)
    assert image.read_bytes().count(0) == 8 << 20
    assert image.stat().st_blocks * 512 < 1 << 20
