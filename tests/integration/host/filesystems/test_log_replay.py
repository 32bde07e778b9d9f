"""The logs of filesystems whose last user ended without an unmount, as their own kernel left them."""

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from crust.host.filesystems import log_replay, mkfs, superblocks
from crust.host.mounts import mount_api
from tests.integration.host.conftest import MIB, Attach
from tests.support.raised import raised

pytestmark = pytest.mark.root


def write_synced(directory: str) -> None:
    fd = os.open(f"{directory}/file", os.O_WRONLY | os.O_CREAT)
    try:
        os.write(fd, b"synced")
        os.fsync(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("fs_type", mkfs.SUPPORTED)
def test_log_is_due_after_a_kill_until_a_writable_mount(
    attach: Attach, mountpoint: str, tmp_path: Path, fs_type: str
) -> None:
    device, copy = attach(512 * MIB), str(tmp_path / "copy")
    assert not log_replay.is_due(device.path, fs_type)  # the mount says what is there
    subprocess.run([f"mkfs.{fs_type}", "-q", device.path], check=True, capture_output=True)
    assert not log_replay.is_due(device.path, fs_type)
    mount_api.mount_device(device.path, mountpoint, fs_type)
    write_synced(mountpoint)
    shutil.copyfile(device.backing, copy)  # as a killed guest leaves it
    mount_api.unmount(mountpoint)
    log_replay.check("v", device.path, fs_type)
    shutil.copyfile(copy, device.backing)
    assert log_replay.is_due(device.path, fs_type)
    with raised("LogNotReplayed", match=f"the log of its {fs_type}"):
        log_replay.check("v", device.path, fs_type)
    os.close(mount_api.open_root(device.path, fs_type))
    assert not log_replay.is_due(device.path, fs_type)


def _state(path: str) -> str:
    """What the tool of xfs says of the log."""
    done = subprocess.run(["xfs_logprint", "-t", "-n", path], capture_output=True, check=True)
    return done.stdout.decode().partition("state: <")[2].partition(">")[0]


def test_log_of_xfs_is_due_as_its_own_tool_says(
    attach: Attach, mountpoint: str, tmp_path: Path
) -> None:
    """Through more than two rounds of a small log, after unmounts, in use and frozen."""
    device, copy = attach(320 * MIB), str(tmp_path / "copy")
    small = dict.fromkeys(("TEST_DIR", "TEST_DEV", "QA_CHECK_FS"), "1")  # mkfs: it is a test
    make = ["mkfs.xfs", "-q", "-l", "size=6m", device.path]
    subprocess.run(make, check=True, env=os.environ | small)
    seen = [(_state(device.path), log_replay.is_due(device.path, "xfs"))]
    for number in range(12):
        mount_api.mount_device(device.path, mountpoint, "xfs")
        for name in range(1500):
            os.mknod(f"{mountpoint}/{number}-{name}")
        write_synced(mountpoint)
        for is_frozen in (False, True):
            freeze = (
                subprocess.run(["fsfreeze", "-f", mountpoint], check=True) if is_frozen else None
            )
            shutil.copyfile(device.backing, copy)
            if freeze is not None:
                subprocess.run(["fsfreeze", "-u", mountpoint], check=True)
            seen.append((_state(copy), log_replay.is_due(copy, "xfs")))
        mount_api.unmount(mountpoint)
        seen.append((_state(device.path), log_replay.is_due(device.path, "xfs")))
    assert set(seen) == {("CLEAN", False), ("DIRTY", True)}
    with open(copy, "rb") as file:
        file.seek(log_replay._place(file.read(512))[0])
        assert struct.unpack(">3I", file.read(12))[1] > 2, "the log has no third round"


def test_log_that_lies_outside_is_no_answer(attach: Attach) -> None:
    device = attach(320 * MIB)
    subprocess.run(["mkfs.xfs", "-q", device.path], check=True)
    with open(device.path, "r+b") as file:
        file.seek(48)
        file.write(b"\xff" * 8)
    with pytest.raises(superblocks.InvalidSuperblock, match="log"):
        log_replay.is_due(device.path, "xfs")
