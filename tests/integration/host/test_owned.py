"""What a file has to itself, on filesystems that share blocks and on one that does not."""

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from crust.host.files import owned
from crust.host.filesystems import filesystems
from crust.host.mounts import mounts
from tests.integration.host.conftest import MIB, Attach

pytestmark = pytest.mark.root

_FICLONE = 0x40049409
_MKFS = {"xfs": "mkfs.xfs", "btrfs": "mkfs.btrfs", "ext4": "mkfs.ext4"}


def written(path: Path, size_bytes: int) -> str:
    with path.open("wb") as file:
        file.write(os.urandom(size_bytes))
        file.truncate(16 * MIB)
        os.fsync(file.fileno())
    return str(path)


def overwrite(path: str, size_bytes: int) -> None:
    with open(path, "r+b") as file:
        file.write(os.urandom(size_bytes))
        os.fsync(file.fileno())


@pytest.mark.parametrize("fs_type", ["xfs", "btrfs"])
def test_a_block_that_two_files_share_is_neithers_own(
    attach: Attach, mountpoint: str, fs_type: str
) -> None:
    device = attach(320 * MIB)
    subprocess.run([_MKFS[fs_type], "-q", device.path], check=True, capture_output=True)
    mounts.mount_device(device.path, mountpoint, fs_type)
    source, copy = written(Path(mountpoint, "a"), 4 * MIB), str(Path(mountpoint, "b"))
    assert owned.owned(source) == owned.Owned(4 * MIB, shares=False)
    with open(source, "rb") as old, open(copy, "wb") as new:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        os.fsync(new.fileno())
    assert owned.owned(source) == owned.Owned(0, shares=True)
    overwrite(copy, MIB)
    assert owned.owned(copy) == owned.Owned(MIB, shares=True)
    os.unlink(source)
    # xfs frees a removed file's blocks in the background; a freeze waits until it has, which sync(2) does not
    filesystems.freeze(mountpoint)
    filesystems.thaw(mountpoint)
    assert owned.owned(copy) == owned.Owned(4 * MIB, shares=False)


def test_an_ordinary_file_owns_what_it_takes_and_a_hole_takes_nothing(tmp_path: Path) -> None:
    assert owned.owned(written(tmp_path / "a", 2 * MIB)).size_bytes == 2 * MIB
    assert owned.owned(written(tmp_path / "b", 0)).size_bytes == 0
