"""Block devices of the real kernel: identity, exclusive opens, blankness."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from crust import errors
from crust.host.block import devices, loop
from crust.host.mounts import mount_api
from tests.integration.host.conftest import MIB, Attach, partition_table, run, write

pytestmark = pytest.mark.root


def test_identify_follows_a_link(attach: Attach, tmp_path: Path) -> None:
    device = attach()
    (tmp_path / "by-id").symlink_to(device.path)
    assert devices.identify(str(tmp_path / "by-id")) == device.identity


def test_identify_after_reattach_is_another_device(attach: Attach) -> None:
    first = attach()
    loop.detach(first)
    second = loop.attach(first.backing)
    assert second.identity.disk_sequence > first.identity.disk_sequence


def test_open_exclusive_blocks_mkfs_mount_and_a_second_hold_but_no_reader(
    attach: Attach, tmp_path: Path
) -> None:
    device = attach()
    hold = devices.open_exclusive(device.path)
    try:
        done = subprocess.run(
            ["mkfs.ext4", "-q", "-F", device.path], capture_output=True, check=False
        )
        assert done.returncode != 0
        with pytest.raises(errors.CrustError) as refused:
            mount_api.mount_device(device.path, str(tmp_path), "ext4")
        assert isinstance(refused.value.__cause__, OSError)
        assert refused.value.__cause__.errno == errno.EBUSY
        with pytest.raises(devices.DeviceInUse) as caught:
            devices.open_exclusive(device.path)
        assert [holder.pid for holder in caught.value.holders] == [os.getpid()]
        os.close(os.open(device.path, os.O_RDWR))
    finally:
        os.close(hold)
    assert devices.is_blank(device.path)


def test_open_exclusive_of_a_mounted_device_names_the_mount(
    attach: Attach, mountpoint: str
) -> None:
    device = attach()
    run("mkfs.ext4", "-q", device.path)
    mount_api.mount_device(device.path, mountpoint, "ext4")
    with pytest.raises(devices.DeviceInUse) as caught:
        devices.open_exclusive(device.path)
    assert caught.value.mounts == (mountpoint,)


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


@pytest.mark.parametrize("size", [512, MIB + 512, 3 * MIB - 512])
def test_is_blank_reads_the_last_sector_of_an_odd_device(attach: Attach, size: int) -> None:
    device = attach(size)
    assert devices.is_blank(device.path)
    with open(device.path, "r+b") as file:
        file.seek(size - 1)
        file.write(b"x")
    assert not devices.is_blank(device.path)


def test_identify_of_a_partition_uses_its_disks_sequence(attach: Attach) -> None:
    device = attach()
    write(device.path, 0, partition_table(sectors=2048))
    run("partx", "-a", device.path)
    try:
        part = devices.identify(f"{device.path}p1")
        assert part.disk_sequence == device.identity.disk_sequence
        assert (part.major, part.minor) != (device.identity.major, device.identity.minor)
    finally:
        run("partx", "-d", device.path)


def test_is_free_is_false_when_mounted_held_or_replaced(attach: Attach, mountpoint: str) -> None:
    device, other = attach(64 * MIB), attach(64 * MIB)
    identity = devices.identify(device.path)
    assert devices.is_free(device.path, identity)
    assert not devices.is_free(other.path, identity)
    assert not devices.is_free("/dev/null", identity)
    assert not devices.is_free("/dev/absent", identity)
    hold = devices.open_exclusive(device.path)
    assert not devices.is_free(device.path, identity)
    os.close(hold)
    subprocess.run(["mkfs.ext4", "-q", device.path], check=True)
    mount_api.mount_device(device.path, mountpoint, "ext4", readonly=True)
    assert not devices.is_free(device.path, identity)
