"""Whether a file has sparse, with the file's own answer."""

import fcntl
import os
import select
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from crust.core.volumes import TargetPath
from crust.host.block import loop
from crust.host.files import sparse, target_paths
from crust.host.mounts import mount_api
from tests.integration.host.conftest import MIB, Attach, MakeFile
from tests.support.raised import raised

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


def test_remove_of_a_mount_point_is_refused(mountpoint: str, tmp_path: Path) -> None:
    """Device numbers are equal for a bind within one filesystem: a removal by them would delete the volume's data."""
    target, roots = TargetPath.parse(mountpoint), [str(tmp_path)]
    (tmp_path / "source").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    for is_bind in (False, True):
        if is_bind:
            mount_api.bind(str(tmp_path / "source"), mountpoint)
        else:
            mount_api.mount_guard(mountpoint)
        target_paths.make_directory(target, roots)
        with raised("TargetStillMounted"):
            target_paths.remove(target, roots)
        with raised("TargetStillMounted"):
            target_paths.remove(TargetPath.parse(f"{tmp_path}/link/target"), [f"{tmp_path}/link"])
        mount_api.unmount(mountpoint)
    target_paths.remove(target, roots)
    assert not Path(mountpoint).exists()
    Path(mountpoint).mkdir()


def test_make_file_keeps_a_bound_device_alone(attach: Attach, tmp_path: Path) -> None:
    device: loop.LoopDevice = attach()
    target, roots = TargetPath.parse(str(tmp_path / "block")), [str(tmp_path)]
    target_paths.make_file(target, roots)
    mount_api.bind(device.path, target.text)
    try:
        target_paths.make_file(target, roots)
        with raised("TargetStillMounted"):
            target_paths.remove(target, roots)
    finally:
        mount_api.unmount(target.text)
    target_paths.remove(target, roots)
    assert not (tmp_path / "block").exists()
