"""Freezing a filesystem, by the real kernel."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from crust.blockdriver.host import fsfreeze
from crust.core import errors
from crust.host.filesystems import mkfs
from crust.host.mounts import mount_api
from tests.integration.host.conftest import Attach, run
from tests.support.frozen import is_frozen
from tests.support.leaks import children

pytestmark = pytest.mark.root


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


def test_thaw_leaves_no_process(attach: Attach, mountpoint: str) -> None:
    device = attach()
    run("mkfs.ext4", "-q", device.path)
    mount_api.mount_device(device.path, mountpoint, "ext4")
    before = set(children())
    freeze = fsfreeze.Freeze(mountpoint)
    assert len(set(children()) - before) == 1
    assert freeze.thaw()
    assert set(children()) <= before


def test_killed_process_leaves_nothing_frozen(attach: Attach, mountpoint: str) -> None:
    """A writer goes on, and no driver starts."""
    device = attach()
    run("mkfs.ext4", "-q", device.path)
    mount_api.mount_device(device.path, mountpoint, "ext4")
    frozen, told = os.pipe()
    driver = os.fork()
    if not driver:
        with suppress(BaseException):
            fsfreeze.Freeze(mountpoint)
            os.write(told, b"x")
            signal.pause()
        os._exit(1)
    os.close(told)
    assert os.read(frozen, 1) == b"x"
    os.close(frozen)
    assert is_frozen(mountpoint)
    os.kill(driver, signal.SIGKILL)
    os.waitpid(driver, 0)
    write = ["sh", "-c", 'echo x > "$1/file"', "sh", mountpoint]
    subprocess.run(write, check=True)
    assert not is_frozen(mountpoint)
