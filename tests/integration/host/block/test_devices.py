"""Devices of the kernel and their nodes; deploy/host against udev and LVM, on a device with a physical volume."""

import errno
import os
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crust.blockdriver.engines.pool_access import PoolIds
from crust.core import errors
from crust.host.answers import NotSeen
from crust.host.block import devices, holders, loop, signatures, users
from crust.host.mounts import mount_api
from tests.integration.host.conftest import MIB, Attach, MakeFile, read, run, write
from tests.support.faults.syncs import recorded
from tests.support.raised import raised

pytestmark = pytest.mark.root


def test_identify_follows_a_link_and_tells_a_reattached_device(
    attach: Attach, tmp_path: Path
) -> None:
    device = attach()
    (tmp_path / "by-id").symlink_to(device.path)
    assert devices.identify(str(tmp_path / "by-id")) == device.identity
    loop.detach(device)
    assert loop.attach(device.backing).identity.disk_sequence > device.identity.disk_sequence


def test_exclusive_open_blocks_all_but_readers(attach: Attach, tmp_path: Path) -> None:
    device = attach()
    hold = devices.open_exclusive(device.path)
    try:
        done = subprocess.run(
            ["mkfs.ext4", "-q", "-F", device.path], capture_output=True, check=False
        )
        assert done.returncode != 0
        acts: tuple[Callable[[], object], ...] = (
            lambda: mount_api.mount_device(device.path, str(tmp_path), "ext4"),
            lambda: devices.open_exclusive(device.path),
        )
        for act in acts:
            with pytest.raises(holders.DeviceInUse) as caught:
                act()
            assert [holder.pid for holder in caught.value.holders] == [os.getpid()]
        os.close(os.open(device.path, os.O_RDWR))
    finally:
        os.close(hold)
    assert devices.is_blank(device.path)


def test_set_readonly_can_be_undone(attach: Attach) -> None:
    device = attach()
    devices.set_readonly(device.path, readonly=True)
    assert devices.is_readonly(device.path)
    fd = os.open(device.path, os.O_RDWR)
    try:
        with pytest.raises(OSError, match="permitted") as caught:
            os.pwrite(fd, b"x" * 512, 0)
        assert caught.value.errno == errno.EPERM
    finally:
        os.close(fd)
    devices.set_readonly(device.path, readonly=False)
    assert not devices.is_readonly(device.path)
    Path(device.path).open("r+b").close()


def test_device_is_held_when_mounted_or_held_and_never_elsewhere(
    attach: Attach, mountpoint: str
) -> None:
    device, other = devices.source(attach(64 * MIB).path), attach(64 * MIB)
    assert not users.is_held(device)
    for path in (other.path, "/dev/null", "/dev/absent"):  # not its node: nobody was asked
        with pytest.raises(NotSeen):
            users.is_held(replace(device, path=path))
    hold = devices.open_exclusive(device.path)
    assert users.is_held(device)
    os.close(hold)
    subprocess.run(["mkfs.ext4", "-q", device.path], check=True)
    mount_api.mount_device(device.path, mountpoint, "ext4", readonly=True)
    assert users.is_held(device)
    with pytest.raises(holders.DeviceInUse) as caught:
        devices.open_exclusive(device.path)
    assert caught.value.mounts == (mountpoint,)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[str]:
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    attach = ["losetup", "--find", "--show", "--partscan", str(image)]
    attached = subprocess.run(attach, check=True, capture_output=True, text=True, timeout=30)
    device = attached.stdout.strip()
    # told to the kernel, because a kernel may know no partition tables
    for index, first, sectors in (("1", "2048", "8192"), ("2", "10240", "16384")):
        subprocess.run(["addpart", device, index, first, sectors], check=True, timeout=30)
    yield device
    subprocess.run(["losetup", "--detach", device], check=True, timeout=30)


def number(path: str) -> int:
    return os.stat(path).st_rdev


def test_node_of_a_bind_is_the_node_in_dev(disk: str) -> None:
    assert devices.node_of(number(disk)) == disk
    assert not devices.is_encrypted(number(disk))


def test_partition_has_own_node_and_size_and_its_disks_sequence(disk: str) -> None:
    second = devices.partition_of(number(disk), 2)
    assert second != number(disk)
    assert devices.partition_of(second, 2) == second
    with raised("PartitionMissing", match="partition 3"):
        devices.partition_of(number(disk), 3)
    with raised("PartitionMissing", match="partition 1"):
        devices.partition_of(second, 1)
    if not os.path.exists(f"{disk}p2"):  # without udev or devtmpfs nobody makes it
        os.mknod(f"{disk}p2", 0o60600, second)
    path = devices.node_of(second)
    assert (path, devices.size_bytes(path)) == (f"{disk}p2", 8 * MIB)
    assert devices.identify(path).disk_sequence == devices.identify(disk).disk_sequence


def test_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(errors.NotFound, match="7:250"):
        devices.node_of(os.makedev(7, 250))


def test_probe_of_what_is_no_filesystem_is_other(attach: Attach) -> None:
    device = attach()
    run("mkswap", device.path)
    assert signatures.probe(device.path) == signatures.Other("other swap")
    write(device.path, 0, b"LUKS\xba\xbe\x00\x01" + bytes(600))
    write(device.path, 4096 - 10, bytes(10))
    assert signatures.probe(device.path) == signatures.Other("crypto crypto_LUKS")


def test_probe_of_two_signatures_is_ambiguous(attach: Attach) -> None:
    device, other = attach(300 * MIB), attach(300 * MIB, "other.img")
    run("mkfs.xfs", "-q", device.path)
    run("mkfs.ext4", "-q", other.path)
    write(device.path, 1024, read(other.path, 1024, 1024))
    with pytest.raises(signatures.AmbiguousSignature):
        signatures.probe(device.path)


def test_probe_of_detached_device_is_an_error(attach: Attach) -> None:
    device = attach()
    loop.detach(device)
    with pytest.raises(errors.RuntimeFailed, match="no size"):
        signatures.probe(device.path)
    with pytest.raises(errors.NotReady, match="no size"):
        devices.is_blank(device.path)


def test_zero_device_reads_as_zeros_and_frees_its_space(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(os.urandom(8 << 20))
    device = loop.attach(str(image))
    try:
        hold = devices.open_exclusive(device.path)
        with pytest.raises(holders.DeviceInUse):
            devices.zero_device(device.path)
        os.close(hold)
        assert not devices.is_blank(device.path)
        with recorded() as steps:
            devices.zero_device(device.path)
        assert steps == [("sync", device.path)]
        assert Path(device.path).read_bytes().count(0) == 8 << 20
    finally:
        loop.detach(device)
    assert image.read_bytes().count(0) == 8 << 20
    assert image.stat().st_blocks * 512 < 1 << 20


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
