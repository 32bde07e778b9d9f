"""Whether a file has writers, with the file's own answer."""

import fcntl
import os
import select
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from crust.host.block import loop
from crust.host.files import sparse
from crust.host.mounts import mount_api
from tests.integration.host.conftest import MIB, Attach, MakeFile

pytestmark = pytest.mark.root


def test_has_writers_finds_loop_devices_and_processes(sparse_file: MakeFile) -> None:
    path = sparse_file()
    assert not sparse.has_writers(path)
    with open(path, "rb"):
        assert not sparse.has_writers(path)
    with open(path, "r+b"):
        assert sparse.has_writers(path)
    device = loop.attach(path)
    assert sparse.has_writers(path)
    loop.detach(device)
    assert not sparse.has_writers(path)
    assert not sparse.has_writers(f"{path}-absent")


@pytest.mark.parametrize("fs_type", ["xfs", "btrfs", "ext4"])
def test_has_writers_works_on_every_pool_filesystem(
    attach: Attach, mountpoint: str, fs_type: str
) -> None:
    device = attach(320 * MIB)
    subprocess.run([f"mkfs.{fs_type}", "-q", device.path], check=True, capture_output=True)
    mount_api.mount_device(device.path, mountpoint, fs_type)
    path = Path(mountpoint, "image")
    path.write_bytes(bytes(MIB))
    assert not sparse.has_writers(str(path))
    with path.open("ab"):
        assert sparse.has_writers(str(path))


def _open_and_close(path: str) -> None:
    os.close(os.open(path, os.O_RDWR))


def _grow(path: str) -> None:
    assert sparse.grow(path, 128 * MIB) == 128 * MIB


def _attach(path: str) -> None:
    loop.detach(loop.attach(path))


@pytest.mark.parametrize("open_it", [_open_and_close, _grow, _attach])
def test_has_writers_during_an_open_disturbs_neither(
    sparse_file: MakeFile, monkeypatch: pytest.MonkeyPatch, open_it: Callable[[str], None]
) -> None:
    path = sparse_file()
    opener = ThreadPoolExecutor(1)
    opened: list[Future[None]] = []
    real = fcntl.fcntl

    def meanwhile(fd: int, command: int, argument: int) -> int:
        if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_UNLCK) and not opened:
            opened.append(opener.submit(open_it, path))
            assert select.select([signalled], [], [], 30)[0]
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", meanwhile)
    # A Python handler may run while this thread waits with a lock held; the descriptor is written below Python.
    signalled, signal_to = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.signal(signal.SIGURG, lambda *_: None), signal.set_wakeup_fd(signal_to)
    try:
        assert not sparse.has_writers(path)
        opener.shutdown()
        opened[0].result()
        assert set(os.read(signalled, 8)) == {signal.SIGURG}
    finally:
        signal.set_wakeup_fd(before[1])
        signal.signal(signal.SIGURG, before[0])
        os.close(signalled)
        os.close(signal_to)
