"""Who has a device: named where it can be seen, and never waited for."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest

from crust.host.block import devices, holders, loop, loopctl
from crust.host.mounts import mount_api
from tests.integration.host.conftest import Attach
from tests.support.faults.hung_files import HungFile

pytestmark = pytest.mark.root

T = TypeVar("T")


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[str]:
    """A mounted filesystem whose server never answers."""
    path = tmp_path / "hung"
    path.mkdir()
    with HungFile(path):
        yield str(path)


def in_a_thread(look: Callable[[], T]) -> T:
    """So that a search that hangs is a failed test, and ends with the file server."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(look())
        except Exception as error:  # whatever it is, the test gets it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future.result(timeout=30)


def test_of_mount_does_not_wait_for_a_hung_file_server(attach: Attach, hung: str) -> None:
    """stat(2) of a file that is open there never returns, and with it the unstage that only wants the reason."""
    device = attach()
    open_there = os.open(hung, os.O_PATH)
    held = os.open(device.path, os.O_RDONLY)
    try:
        with pytest.raises(holders.DeviceInUse, match=rf"\[{os.getpid()}\] by fd {held}"):
            in_a_thread(lambda: loop.detach(device))
        assert in_a_thread(lambda: holders.of_mount(hung)) != ()
    finally:
        os.close(held)
        os.close(open_there)


def test_device_in_use_names_a_loop_device_on_it(attach: Attach, tmp_path: Path) -> None:
    """A kubelet holds each raw volume by one, also when it forgot the volume."""
    device, target = attach(), str(tmp_path / "target")
    Path(target).touch()
    mount_api.bind(device.path, target)
    argv = ["losetup", "--find", "--show", target]
    upper = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    try:
        assert devices.size_bytes(upper) == devices.size_bytes(device.path)
        with pytest.raises(holders.DeviceInUse, match=upper):
            mount_api.unmount(target)
        with pytest.raises(holders.DeviceInUse, match=f"backing {upper}"):
            loop.detach(device)
    finally:
        subprocess.run(["losetup", "--detach", upper], check=True)
    mount_api.unmount(target)


@pytest.mark.parametrize("detached", ["target", "."], ids=["its node", "its tree"])
def test_device_in_use_names_loop_device_whose_path_lost_its_prefix(
    attach: Attach, tmp_path: Path, detached: str
) -> None:
    """A kubelet in a container that ended: its loop device is left, and sysfs has "/" for its path."""
    device, tree = attach(), tmp_path / "kubelet"
    target = tree / "target"
    tree.mkdir()
    mount_api.bind(str(tree), str(tree))
    target.touch()
    mount_api.bind(device.path, str(target))
    argv = ["losetup", "--find", "--show", str(target)]
    upper = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run(["umount", "--lazy", str(tree / detached)], check=True)
    try:
        assert loopctl.backing_file(int(upper.removeprefix("/dev/loop"))) == "/"
        assert holders.device_in_use(device.path).loops == (upper,)
    finally:
        subprocess.run(["losetup", "--detach", upper], check=True)
        subprocess.run(["umount", "--recursive", "--quiet", str(tree)], check=False)


def test_device_in_use_asks_no_loop_device_on_a_file(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOOP_GET_STATUS64 asks the filesystem of the backing file, and its server may hang."""
    device, other = attach(), attach(name="other.img")
    asked: list[int] = []
    status = loopctl.status

    def recorded(fd: int) -> object:
        asked.append(os.fstat(fd).st_rdev)
        return status(fd)

    monkeypatch.setattr(loopctl, "status", recorded)
    assert not holders.device_in_use(device.path).loops
    assert not {os.stat(each.path).st_rdev for each in (device, other)} & set(asked)
