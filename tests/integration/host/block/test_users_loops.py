"""The loop devices on a device are its users: those that a kubelet makes of raw volumes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from crust.core import volumes
from crust.host.block import devices, holders, loop, loopctl, users
from crust.host.mounts import mount_api, mountinfo
from tests.integration.host.conftest import Attach, run

pytestmark = pytest.mark.root

_WITHOUT_NODE = """
mount -t tmpfs tmpfs /mnt
cp --archive /dev/null /dev/urandom "$1" /mnt
mount --move /mnt /dev
exec setpriv --bounding-set=-mknod --inh-caps=-mknod "$0" -c '
import sys
from crust.core import volumes
from crust.host import answers
from crust.host.block import devices, users
device = volumes.BlockSource(sys.argv[1], devices.identify(sys.argv[1]))
try:
    users.check(device, users.Purpose.GUEST_WRITES)
except answers.NotSeen as error:
    print(error.shown())' "$1"
"""


@contextmanager
def kubelets_loop(attach: Attach, target: Path) -> Iterator[tuple[loop.LoopDevice, str]]:
    """A device whose node is bound at the target, and the loop device that a kubelet has on it."""
    device = attach()
    target.touch()
    mount_api.bind(device.path, str(target))
    argv = ["losetup", "--find", "--show", str(target)]
    upper = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    try:
        yield device, upper
    finally:
        subprocess.run(["losetup", "--detach", upper], check=True)


def test_in_use_names_a_loop_device_on_it(attach: Attach, tmp_path: Path) -> None:
    """A kubelet holds each raw volume by one, also when it forgot the volume."""
    target = tmp_path / "target"
    with kubelets_loop(attach, target) as (device, upper):
        assert devices.size_bytes(upper) == devices.size_bytes(device.path)
        with pytest.raises(holders.DeviceInUse, match=upper):
            mount_api.unmount(str(target))
        with pytest.raises(holders.DeviceInUse, match=f"backing {upper}"):
            loop.detach(device)
    mount_api.unmount(str(target))


@pytest.mark.parametrize("detached", ["target", "."], ids=["its node", "its tree"])
def test_in_use_names_loop_device_of_shortened_path(
    attach: Attach, tmp_path: Path, detached: str
) -> None:
    """A kubelet in a container that ended: its loop device is left, and sysfs has "/" for its path.

    A daemon that has no node of that device, and may make none, is told so, and does not call the device unused.
    """
    tree = tmp_path / "kubelet"
    tree.mkdir()
    mount_api.bind(str(tree), str(tree))
    with kubelets_loop(attach, tree / "target") as (device, upper):
        subprocess.run(["umount", "--lazy", str(tree / detached)], check=True)
        assert loopctl.backing_file(int(upper.removeprefix("/dev/loop"))) == "/"
        assert users.in_use(device.path).loops == (upper,)
        refused = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", _WITHOUT_NODE, sys.executable, device.path],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        assert "(EPERM); it needs the node of that loop device" in refused
        assert "CAP_MKNOD" in refused
    subprocess.run(["umount", "--recursive", "--quiet", str(tree)], check=False)


def test_in_use_asks_no_loop_device_on_a_file(
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
    assert not users.in_use(device.path).loops
    assert not {os.stat(attached.path).st_rdev for attached in (device, other)} & set(asked)


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[None]:
    """The files of the test are in memory."""
    run("mount", "-t", "tmpfs", "tmpfs", str(tmp_path))
    yield
    run("umount", str(tmp_path))


@pytest.mark.usefixtures("in_memory")
def test_one_look_for_several_devices_reads_the_mounts_once(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node without a disk each file may be the node of a device."""
    attached = [attach(name=f"{at}.img") for at in range(3)]
    texts: list[tuple[mountinfo.Mount, ...]] = []
    read_all = mountinfo.read_all

    def recorded() -> tuple[mountinfo.Mount, ...]:
        texts.append(read_all())
        return texts[-1]

    monkeypatch.setattr(mountinfo, "read_all", recorded)
    look = users.look_at_host()
    for device in attached:
        source = volumes.BlockSource(device.path, devices.identify(device.path))
        users.check(source, users.Purpose.GUEST_WRITES, look=lambda: look)
    assert len(texts) == 1
