"""deploy/host against udev and LVM, on a device with a physical volume."""

import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.blockdriver.engines.pool_access import PoolIds
from crust.host.block import loop
from tests.integration.host.conftest import MIB, MakeFile, run

pytestmark = pytest.mark.root

HOST = Path(__file__).parents[4] / "deploy" / "host"

PVS = "pvs --config 'devices{{{}}}' --noheadings -o pv_name"

# /run, for LVM's files and udev's, and /dev with nothing but what the tools open.
ALONE = """
set -eu
mount -t tmpfs none /run
mkdir -p /run/udev/rules.d
mkdir -p /run/dev/block
cp -a "/dev/$1" /dev/null /dev/urandom /run/dev
ln -s "../$1" "/run/dev/block/7:${1#loop}"
mount --bind /run/dev /dev
"""


@pytest.fixture
def volume(sparse_file: MakeFile, tmp_path: Path) -> Iterator[loop.LoopDevice]:
    """A volume of the driver, named as it names its images, in which a guest has made a physical volume of LVM."""
    name = PoolIds("0123456789abcdef").volume_id("pvc-1")
    (tmp_path / "volumes" / name).mkdir(parents=True)
    device = loop.attach(sparse_file(64 * MIB, f"volumes/{name}/{name}.img"))
    yield from _with_physical_volume(device)


@pytest.fixture
def other_device(sparse_file: MakeFile) -> Iterator[loop.LoopDevice]:
    """A loop device that is not crust's, with the same in it."""
    yield from _with_physical_volume(loop.attach(sparse_file(64 * MIB, "disk.img")))


def _with_physical_volume(device: loop.LoopDevice) -> Iterator[loop.LoopDevice]:
    try:
        alone(f"pvcreate --config devices/use_devicesfile=0 --yes {device.path}", device)
        yield device
    finally:
        loop.detach(device)


def alone(script: str, device: loop.LoopDevice) -> str:
    """Run a script where /dev and /run are its own, and give what it printed."""
    name = os.path.basename(device.path)
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    done = subprocess.run(
        [*argv, ALONE + textwrap.dedent(script), "sh", name],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def properties(device: loop.LoopDevice, action: str = "change") -> dict[str, str]:
    """What udev knows of the device with the rules that are shipped, and "watch" if it looks again at each close."""
    text = alone(
        f"cp {HOST}/59-crust.rules /run/udev/rules.d/; udevadm test --action={action} /sys/block/$1",
        device,
    )
    assert "59-crust.rules:" not in text, "udev complains of the rules"
    told = dict(
        line.split("=", 1) for line in text.splitlines() if line[:1].isupper() and "=" in line
    )
    return told | ({"pvscan": "ran"} if "lvm pvscan" in text else {})


@pytest.mark.parametrize("action", ["add", "change"])
def test_udev_does_not_probe_volume_and_hands_it_to_nobody(
    volume: loop.LoopDevice, action: str
) -> None:
    told = properties(volume, action)
    assert not [key for key in told if key.startswith(("ID_FS", "ID_PART", "LVM_"))]
    assert "pvscan" not in told
    assert (told["SYSTEMD_READY"], told["UDISKS_IGNORE"], told["CRUST_VOLUME"]) == ("0", "1", "1")


def test_udev_still_probes_a_device_that_is_not_crusts(other_device: loop.LoopDevice) -> None:
    told = properties(other_device)
    assert (told["ID_FS_TYPE"], told["pvscan"]) == ("LVM2_member", "ran")
    assert "CRUST_VOLUME" not in told


def test_udev_does_not_probe_kubelets_loop_device_on_raw_volume(
    other_device: loop.LoopDevice, tmp_path: Path
) -> None:
    """A kubelet attaches a second loop device to the bind of a raw volume's node, and so with the same bytes."""
    node = tmp_path / "plugins/kubernetes.io/csi/volumeDevices/publish/pvc-1/uid"
    node.parent.mkdir(parents=True)
    node.touch()
    run("mount", "--bind", other_device.path, str(node))
    try:
        argv = ["losetup", "--find", "--show", str(node)]
        upper = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
        named = loop.list_named(lambda _: True)
        (device,) = (attached for attached in named if attached.path == upper)
        try:
            assert properties(device)["CRUST_VOLUME"] == "1"
        finally:
            loop.detach(device)
    finally:
        run("umount", str(node))


def physical_volumes(device: loop.LoopDevice, tmp_path: Path, *, devices_file: bool) -> str:
    """What `pvs` shows with the shipped settings."""
    system = tmp_path / "lvm"
    (system / "devices").mkdir(parents=True)
    shutil.copy(HOST / "lvm.conf", system / "lvm.conf")
    if devices_file:
        (system / "devices" / "system.devices").touch()
    else:  # what an older LVM needs instead
        text = (system / "lvm.conf").read_text()
        text = text.replace("use_devicesfile = 1", "use_devicesfile = 0")
        (system / "lvm.conf").write_text(text.replace("# global_filter", "global_filter"))
    return alone(f"LVM_SYSTEM_DIR={system} pvs --noheadings -o pv_name", device)


@pytest.mark.parametrize("devices_file", [True, False])
def test_lvm_sees_no_volume_with_the_shipped_settings(
    volume: loop.LoopDevice, tmp_path: Path, *, devices_file: bool
) -> None:
    assert "/dev/" not in physical_volumes(volume, tmp_path, devices_file=devices_file)
    assert volume.path in alone(PVS.format("use_devicesfile=0"), volume), "and without them it does"


def test_lvm_sees_volume_by_another_name_if_rest_is_accepted(volume: loop.LoopDevice) -> None:
    """Why the shipped settings name what is the node's, and refuse the rest."""
    common = 'use_devicesfile=0 global_filter=["r|^/dev/loop|", "a|.*|"]'
    assert f"/dev/block/7:{volume.number}" in alone(PVS.format(common), volume)
