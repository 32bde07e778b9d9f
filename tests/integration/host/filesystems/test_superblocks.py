"""What a superblock says, beside what the kernel says of the same filesystem once it is mounted."""

import os
import subprocess
from pathlib import Path

import pytest

from crust.host.filesystems import superblocks
from crust.host.mounts import mount_api
from tests.integration.host.conftest import MIB, Attach

pytestmark = pytest.mark.root


_GROUP = 128 * MIB
_SIZES = (
    *(60 * MIB, _GROUP - 4096, _GROUP, _GROUP + 4096, _GROUP + 8 * MIB, 2 * _GROUP + 65536),
    *(_GROUP + n * 65536 for n in (120, 124, 128, 132, 134, 136, 160)),
    *(3 * _GROUP + n * 65536 for n in (4, 120, 132, 140, 200)),
)


@pytest.mark.parametrize(
    "options",
    [
        *([], ["-I", "128", "-i", "65536"], ["-O", "^64bit,^resize_inode"], ["-b", "1024"]),
        *(
            ["-O", "^sparse_super,^resize_inode"],
            ["-O", "meta_bg,^resize_inode"],
            ["-O", "sparse_super2"],
        ),
    ],
)
def test_grown_size_of_ext4_is_that_of_resize2fs(tmp_path: Path, options: list[str]) -> None:
    for size_bytes in _SIZES:
        image = tmp_path / "image"
        subprocess.run(["mkfs.ext4", "-q", "-F", *options, image, "48M"], check=True)
        os.truncate(image, size_bytes)
        said = superblocks.read_ext4(str(image)).grown_bytes(size_bytes)
        subprocess.run(["resize2fs", image], check=True, capture_output=True)
        grown = superblocks.read_ext4(str(image))
        assert grown.size_bytes - said in range(65536), (options, size_bytes)
        assert grown.grown_bytes(size_bytes) <= grown.size_bytes
        os.unlink(image)


@pytest.mark.parametrize("gap_blocks", [0, 1, 63, 64, 200])
def test_grown_size_of_xfs_is_that_of_the_kernel(
    attach: Attach, mountpoint: str, gap_blocks: int
) -> None:
    device = attach(320 * MIB)
    subprocess.run(["mkfs.xfs", "-q", "-d", "size=300m,agcount=4", device.path], check=True)
    group = superblocks.read_xfs(device.path).size_bytes // 4
    size_bytes = 5 * group + gap_blocks * 4096
    said = superblocks.read_xfs(device.path).grown_bytes(size_bytes)
    os.truncate(device.backing, size_bytes)
    subprocess.run(["losetup", "--set-capacity", device.path], check=True)
    mount_api.mount_device(device.path, mountpoint, "xfs")
    subprocess.run(["xfs_growfs", mountpoint], check=True, capture_output=True)
    mount_api.unmount(mountpoint)
    grown = superblocks.read_xfs(device.path)
    assert grown.size_bytes - said in range(65536)
    assert grown.grown_bytes(size_bytes) <= grown.size_bytes


@pytest.mark.parametrize("options", [[], ["-m", "0"], ["-O", "^64bit", "-m", "20"]])
@pytest.mark.parametrize("size_bytes", [48 * MIB, 3072 * MIB])
def test_reserved_blocks_of_ext4_are_those_of_the_kernel(
    attach: Attach, mountpoint: str, size_bytes: int, options: list[str]
) -> None:
    device = attach(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", *options, device.path], check=True)
    reserved = superblocks.read_ext4(device.path).reserved_blocks
    mount_api.mount_device(device.path, mountpoint, "ext4")
    usage = os.statvfs(mountpoint)
    assert reserved == usage.f_bfree - usage.f_bavail
