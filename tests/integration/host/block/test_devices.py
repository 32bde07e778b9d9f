"""Devices of the kernel and their nodes."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.block import devices, holders, loop
from crust.host.mounts import mount_api
from tests.integration.host.conftest import MIB, Attach
from tests.support.faults.syncs import recorded
from tests.support.raised import raised

pytestmark = pytest.mark.root


def test_identify_follows_a_link_and_tells_a_reattached_device(
    attach: Attach, tmp_path: Path
) -> None:
    device = attach()
    (tmp_path / "by-id").symlink_to(device.path)
    assert devices.identify(str(tmp_path / "by-id")) == device.identity
    loop.detach(device)
    assert loop.attach(device.backing).identity.disk_sequence > device.identity.disk_sequence


def test_exclusive_open_blocks_all_but_readers(attach: Attach, tmp_path: Path) -> None:
    device = attach()
    hold = devices.open_exclusive(device.path)
    try:
        done = subprocess.run(
            ["mkfs.ext4", "-q", "-F", device.path], capture_output=True, check=False
        )
        assert done.returncode != 0
        acts: tuple[Callable[[], object], ...] = (
            lambda: mount_api.mount_device(device.path, str(tmp_path), "ext4"),
            lambda: devices.open_exclusive(device.path),
        )
        for act in acts:
            with pytest.raises(holders.DeviceInUse) as caught:
                act()
            assert [holder.pid for holder in caught.value.holders] == [os.getpid()]
        os.close(os.open(device.path, os.O_RDWR))
    finally:
        os.close(hold)
    assert devices.is_blank(device.path)


def test_set_readonly_can_be_undone(attach: Attach) -> None:
    device = attach()
    devices.set_readonly(device.path, readonly=True)
    assert devices.is_readonly(device.path)
    fd = os.open(device.path, os.O_RDWR)
    try:
        with pytest.raises(OSError, match="permitted") as caught:
            os.pwrite(fd, b"x" * 512, 0)
        assert caught.value.errno == errno.EPERM
    finally:
        os.close(fd)
    devices.set_readonly(device.path, readonly=False)
    assert not devices.is_readonly(device.path)
    Path(device.path).open("r+b").close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[str]:
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    attach = ["losetup", "--find", "--show", "--partscan", str(image)]
    attached = subprocess.run(attach, check=True, capture_output=True, text=True, timeout=30)
    device = attached.stdout.strip()
    # told to the kernel, because a kernel may know no partition tables
    for index, first, sectors in (("1", "2048", "8192"), ("2", "10240", "16384")):
        subprocess.run(["addpart", device, index, first, sectors], check=True, timeout=30)
    yield device
    subprocess.run(["losetup", "--detach", device], check=True, timeout=30)


def number(path: str) -> int:
    return os.stat(path).st_rdev


def test_node_of_a_bind_is_the_node_in_dev(disk: str) -> None:
    assert devices.node_of(number(disk)) == disk
    assert not devices.is_encrypted(number(disk))


def test_partition_has_own_node_and_size_and_its_disks_sequence(disk: str) -> None:
    second = devices.partition_of(number(disk), 2)
    assert second != number(disk)
    assert devices.partition_of(second, 2) == second
    with raised("PartitionMissing", match="partition 3"):
        devices.partition_of(number(disk), 3)
    with raised("PartitionMissing", match="partition 1"):
        devices.partition_of(second, 1)
    if not os.path.exists(f"{disk}p2"):  # without udev or devtmpfs nobody makes it
        os.mknod(f"{disk}p2", 0o60600, second)
    path = devices.node_of(second)
    assert (path, devices.size_bytes(path)) == (f"{disk}p2", 8 * MIB)
    assert devices.identify(path).disk_sequence == devices.identify(disk).disk_sequence


def test_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(errors.NotFound, match="7:250"):
        devices.node_of(os.makedev(7, 250))


def test_zero_device_reads_as_zeros_and_frees_its_space(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(os.urandom(8 << 20))
    device = loop.attach(str(image))
    try:
        hold = devices.open_exclusive(device.path)
        with pytest.raises(holders.DeviceInUse):
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
