"""From a device's number to its node, and to the partitions of a disk."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust import errors
from crust.host.block import device_nodes, devices

pytestmark = pytest.mark.root
MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[str]:
    """A disk of two partitions."""
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    attach = ["losetup", "--find", "--show", "--partscan", str(image)]
    found = subprocess.run(attach, check=True, capture_output=True, text=True, timeout=30)
    device = found.stdout.strip()
    # told to the kernel, because a kernel may know no partition tables
    for index, first, sectors in (("1", "2048", "8192"), ("2", "10240", "16384")):
        subprocess.run(["addpart", device, index, first, sectors], check=True, timeout=30)
    yield device
    subprocess.run(["losetup", "--detach", device], check=True, timeout=30)


def number(path: str) -> int:
    return os.stat(path).st_rdev


def test_node_of_a_bind_is_the_node_in_dev(disk: str) -> None:
    assert device_nodes.node_of(number(disk)) == disk
    assert not device_nodes.is_encrypted(number(disk))


def test_partition_of_a_disk_and_of_itself(disk: str) -> None:
    second = device_nodes.partition_of(number(disk), 2)
    assert second != number(disk)
    assert device_nodes.partition_of(second, 2) == second
    with pytest.raises(device_nodes.PartitionMissing, match="partition 3"):
        device_nodes.partition_of(number(disk), 3)
    with pytest.raises(device_nodes.PartitionMissing, match="partition 1"):
        device_nodes.partition_of(second, 1)


def test_partition_has_its_own_node_and_size(disk: str) -> None:
    second = device_nodes.partition_of(number(disk), 2)
    if not os.path.exists(f"{disk}p2"):  # without udev or devtmpfs nobody makes it
        os.mknod(f"{disk}p2", 0o60600, second)
    path = device_nodes.node_of(second)
    assert path == f"{disk}p2"
    assert devices.size_bytes(path) == 8 * MIB


def test_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(errors.NotFound, match="7:250"):
        device_nodes.node_of(os.makedev(7, 250))
