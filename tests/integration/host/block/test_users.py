"""The users of a device: each user that is in the way of a purpose refuses it, and is named; no answer is no user."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from crust.core import volumes
from crust.handoff.record import Record
from crust.host.answers import NotSeen
from crust.host.block import devices, holders, loop, openers, users
from crust.host.block.users import Purpose
from crust.host.mounts import mount_api
from crust.host.process import syscalls
from crust.runtime_handler.blocking import claim
from tests.integration.host.conftest import MIB, Attach, partition_table, run, write
from tests.support.raised import raised
from tests.support.waiting_processes import waiting

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[4]

READONLY = pytest.mark.parametrize("readonly", [False, True], ids=["writer", "reader"])


def check_guest(path: str, *, readonly: bool) -> None:
    purpose = Purpose.GUEST_READS if readonly else Purpose.GUEST_WRITES
    users.check(devices.source(path), purpose)


@pytest.fixture
def partition(attach: Attach, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A disk and its one partition, with an ext4."""
    device = attach()
    sectors = 62 * MIB // 512
    write(device.path, 0, partition_table(sectors=sectors))
    run("addpart", device.path, "1", "2048", str(sectors))
    name = os.path.basename(device.path)
    number = Path(f"/sys/block/{name}/{name}p1/dev").read_text().strip()
    major, minor = map(int, number.split(":"))
    node = str(tmp_path / "p1")
    os.mknod(node, 0o600 | 0o060000, os.makedev(major, minor))
    run("mkfs.ext4", "-q", node)
    yield device.path, node
    run("delpart", device.path, "1")


@contextmanager
def mounted_elsewhere(device: str, target: str, option: str) -> Iterator[int]:
    """The device is mounted in a mount namespace of its own."""
    code = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.unshare(0x20000) == 0\n"
        "assert libc.mount(b'none', b'/', None, 0x44000, None) == 0\n"
        "import subprocess; subprocess.run(['mount', '-o', sys.argv[3], *sys.argv[1:3]], check=True)"
    )
    with waiting(code, device, target, option) as pid:
        yield pid


@READONLY
def test_device_that_nobody_has_is_free(disk: str, *, readonly: bool) -> None:
    check_guest(disk, readonly=readonly)


@READONLY
def test_disk_whose_partition_is_mounted_is_refused(
    partition: tuple[str, str], mountpoint: str, *, readonly: bool
) -> None:
    disk, part = partition
    run("mount", part, mountpoint)
    with raised("DeviceMountedOnHost", match=mountpoint):
        check_guest(disk, readonly=readonly)
    with raised("DeviceMountedOnHost", match=mountpoint):
        users.check_mounts_here(devices.source(disk), readonly=readonly)


def test_partition_of_a_disk_that_is_held_is_refused(partition: tuple[str, str]) -> None:
    disk, part = partition
    held = devices.open_exclusive(disk)
    with pytest.raises(holders.DeviceInUse, match=rf"\[{os.getpid()}\] by fd {held}"):
        check_guest(part, readonly=True)
    os.close(held)
    check_guest(part, readonly=True)


@READONLY
def test_device_that_is_mounted_in_another_mount_namespace_is_refused(
    disk: str, tmp_path: Path, *, readonly: bool
) -> None:
    """Its error reaches a guest's pod, and the namespace may be another tenant's: it is counted, not named."""
    with mounted_elsewhere(disk, str(tmp_path), "rw") as pid:
        with raised("DeviceMountedOnHost", match="a path of 1 other mount namespaces") as refused:
            check_guest(disk, readonly=readonly)
        assert str(tmp_path) not in str(refused.value)
        assert str(pid) not in str(refused.value)


def test_reader_joins_read_only_mounts_alone(disk: str, tmp_path: Path, mountpoint: str) -> None:
    run("mount", "-o", "ro", disk, mountpoint)
    with mounted_elsewhere(disk, str(tmp_path), "ro"):
        check_guest(disk, readonly=True)
        with raised("DeviceMountedOnHost"):
            check_guest(disk, readonly=False)


@READONLY
def test_device_busy_without_a_mount_names_its_holder(disk: str, *, readonly: bool) -> None:
    """Another virtual machine, md, swap: whatever it is, it is somebody."""
    code = "held = os.open(sys.argv[1], os.O_RDONLY | os.O_EXCL)"
    with waiting(code, disk) as pid, pytest.raises(holders.DeviceInUse, match=rf"\[{pid}\]"):
        check_guest(disk, readonly=readonly)


def test_device_with_a_hidden_holder_is_refused(disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder in a PID namespace that this process does not see."""
    held = devices.open_exclusive(disk)
    monkeypatch.setattr(users, "openers", dict)
    with pytest.raises(holders.DeviceInUse, match="does not say what holds it"):
        check_guest(disk, readonly=True)
    os.close(held)


def test_detached_writer_beside_a_read_only_bind_refuses_a_reader(
    disk: str, tmp_path: Path, mountpoint: str
) -> None:
    """The bind is read-only, the filesystem is not: a program with an open file goes on writing."""
    bind = tmp_path / "bind"
    bind.mkdir()
    run("mount", disk, mountpoint)
    run("mount", "--bind", "-o", "ro", mountpoint, str(bind))
    with open(f"{mountpoint}/file", "w") as written:
        run("umount", "--lazy", mountpoint)
        with raised("DeviceMountedOnHost", match=str(bind)):
            check_guest(disk, readonly=True)
        assert written.writable()
    run("umount", str(bind))


def test_exclusive_holder_is_not_explained_by_other_readers(disk: str) -> None:
    """A second reader's open explains no exclusive hold: that is a mount that nobody sees, or a writer."""
    code = "held = os.open(sys.argv[1], os.O_RDONLY | os.O_EXCL)"
    reader = claim.hold_device(record_of(disk, readonly=True))
    with waiting(code, disk), pytest.raises(holders.DeviceInUse):
        check_guest(disk, readonly=True)
    os.close(reader)


def test_brief_user_of_the_device_is_awaited(disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [devices.open_exclusive(disk)]
    look = openers.openers

    def looked() -> openers.Openers:
        found = look()
        if len(held) == 1:
            held.append(-1)  # its end comes after the first look
        elif held[0] >= 0:
            os.close(held[0])
            held[0] = -1
        return found

    monkeypatch.setattr(users, "openers", looked)
    check_guest(disk, readonly=False)
    assert held == [-1, -1]


def test_device_without_user_is_given_without_pause(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a sleep of no time gives the processor away, for each volume of a container."""
    device, pauses = devices.source(disk), list[float]()
    monkeypatch.setattr(users, "openers", dict)
    monkeypatch.setattr(time, "sleep", pauses.append)
    users.check(device, Purpose.GUEST_WRITES)
    assert pauses == []


@pytest.mark.parametrize("options", ["rw", "ro"])
def test_raw_publish_refuses_a_guest_that_one_of_both_writes(
    disk: str, tmp_path: Path, options: str
) -> None:
    """A bind of the node holds nothing: its pod opens the device at any time."""
    target = tmp_path / "raw"
    target.touch()
    mount_api.bind(disk, str(target))
    run("mount", "-o", f"remount,bind,{options}", str(target))
    with pytest.raises(holders.DeviceInUse, match=str(target)):
        check_guest(disk, readonly=False)
    if options == "ro":
        check_guest(disk, readonly=True)
    else:
        with pytest.raises(holders.DeviceInUse, match=str(target)):
            check_guest(disk, readonly=True)
    users.check(devices.source(disk), Purpose.GIVE_BACK)
    mount_api.unmount(str(target))


def test_bind_at_private_path_of_shim_is_no_raw_publish(disk: str, tmp_path: Path) -> None:
    leaf = tmp_path / "volumeDevices" / "publish" / f"crust-{'a' * 40}" / ("b" * 40)
    leaf.parent.mkdir(parents=True)
    leaf.touch()
    mount_api.bind(disk, str(leaf))
    check_guest(disk, readonly=False)
    mount_api.unmount(str(leaf))


@pytest.mark.parametrize(
    ("place", "is_raw_publish"),
    [
        ("pods/uid/volumeDevices/kubernetes.io~csi/pv", True),
        ("plugins/kubernetes.io/csi/volumeDevices/publish/pv/uid", True),
        ("plugins/disks.example.com/vols/1", False),
        ("../vols/1", False),
    ],
)
def test_bind_of_a_driver_itself_is_no_raw_publish(
    disk: str, tmp_path: Path, place: str, *, is_raw_publish: bool
) -> None:
    kubelet, linked = tmp_path / "kubelet", tmp_path / "linked"
    linked.symlink_to(kubelet)
    target = Path(os.path.normpath(kubelet / place))
    target.parent.mkdir(parents=True)
    target.touch()
    mount_api.bind(disk, str(target))
    for root in (kubelet, linked):
        refused = raised("DeviceInUse", match=str(target)) if is_raw_publish else nullcontext()
        with refused:
            users.check(devices.source(disk), Purpose.GUEST_WRITES, published_below=[str(root)])
    mount_api.unmount(str(target))


def test_device_that_is_gone_has_no_users(attach: Attach) -> None:
    device = attach()
    gone = devices.source(device.path)
    loop.detach(device)
    for purpose in Purpose:
        users.check(gone, purpose)
    assert not users.is_held(gone)


def test_device_without_its_node_is_not_seen(disk: str, tmp_path: Path) -> None:
    """A /dev that lacks the node of a device that the kernel has: nobody was asked."""
    elsewhere = volumes.BlockSource(str(tmp_path / "absent"), devices.identify(disk))
    with pytest.raises(NotSeen, match="host's /dev"):
        users.check(elsewhere, Purpose.GUEST_WRITES)
    users.check(elsewhere, Purpose.GIVE_BACK)  # by the open files of processes alone


def test_writes_in_flight_are_a_user_until_they_end(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that wrote by io_uring ends before its writes do."""
    flights = iter([3, 3, 2, 0])
    monkeypatch.setattr(users, "_writes_in_flight", lambda _: next(flights))
    users.check(devices.source(disk), Purpose.GIVE_BACK)
    assert next(flights, None) is None


def test_writes_in_flight_that_do_not_end_are_named(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "_writes_in_flight", lambda _: 5)
    monkeypatch.setattr(users, "_FLIGHT_S", 0.02)
    for purpose in (Purpose.GIVE_BACK, Purpose.GUEST_WRITES, Purpose.HOST, Purpose.FORMAT):
        with raised("WritesInFlight", match="5 writes"):
            users.check(devices.source(disk), purpose)
    check_guest(disk, readonly=True)  # a reader never waits


def test_process_that_only_reads_refuses_nothing(disk: str) -> None:
    """udev, smartd, multipathd."""
    with waiting("held = os.open(sys.argv[1], os.O_RDONLY)", disk):
        check_guest(disk, readonly=False)
        users.check(devices.source(disk), Purpose.GIVE_BACK)
        with pytest.raises(holders.DeviceInUse):
            users.check(devices.source(disk), Purpose.FORMAT)


# A hypervisor opens its disk plainly: O_EXCL succeeds beside it.


def test_process_that_writes_refuses_device_that_is_free_by_exclusivity(disk: str) -> None:
    with waiting("held = os.open(sys.argv[1], os.O_RDWR)", disk) as pid:
        assert not users.is_held(devices.source(disk))
        with pytest.raises(holders.DeviceInUse, match=rf"\[{pid}\] by fd \d+"):
            users.check(devices.source(disk), Purpose.GIVE_BACK)
    users.check(devices.source(disk), Purpose.GIVE_BACK)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_process_that_may_not_trace_has_not_seen_the_users(disk: str, purpose: Purpose) -> None:
    """Without CAP_SYS_PTRACE the kernel lists a descriptor of another process, and does not say where it leads."""
    code = f"""
from crust.host.answers import NotSeen
from crust.host.block import devices, users
try:
    users.check(devices.source({disk!r}), users.Purpose.{purpose.name})
except NotSeen as error:
    assert "EACCES" in str(error) and "CAP_SYS_PTRACE" in str(error), error
else:
    raise SystemExit("nobody was seen, and so nobody was there")
"""
    argv = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
    with waiting("held = os.open(sys.argv[1], os.O_RDWR)", disk):
        subprocess.run([*argv, sys.executable, "-c", code], check=True, cwd=ROOT)


def test_processes_that_come_and_go_refuse_nothing(disk: str) -> None:
    """Each errno of a process that ends during the look is named: no check of an unused device is `NotSeen`."""
    ends = "import subprocess\nwhile True: subprocess.run(['true'])"
    with (
        subprocess.Popen([sys.executable, "-c", ends]) as one,
        subprocess.Popen([sys.executable, "-c", ends]) as two,
    ):
        for _ in range(100):
            users.check(devices.source(disk), Purpose.GUEST_WRITES)
        one.kill()
        two.kill()


def test_process_that_writes_to_a_partition_refuses_its_disk(partition: tuple[str, str]) -> None:
    disk, part = partition
    code = "held = os.open(sys.argv[1], os.O_WRONLY)"
    with waiting(code, part), pytest.raises(holders.DeviceInUse):
        users.check(devices.source(disk), Purpose.GIVE_BACK)


def test_node_in_another_directory_is_the_same_device(disk: str, tmp_path: Path) -> None:
    """As in the /dev of a container, and removed since."""
    node = tmp_path / "vda"
    os.mknod(node, 0o600 | 0o060000, os.stat(disk).st_rdev)
    code = "held = os.open(sys.argv[1], os.O_RDWR); os.unlink(sys.argv[1])"
    with waiting(code, str(node)), pytest.raises(holders.DeviceInUse):
        users.check(devices.source(disk), Purpose.GIVE_BACK)


def test_network_block_server_is_no_writer(disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """rbd-nbd and qemu-nbd have the device open for as long as it is there; sysfs names them."""
    read = syscalls.read_attribute
    monkeypatch.setattr(
        syscalls,
        "read_attribute",
        lambda path: str(os.getpid()) if path.endswith("/pid") else read(path),
    )
    held = os.open(disk, os.O_RDWR)
    users.check(devices.source(disk), Purpose.GIVE_BACK)
    os.close(held)


# A claim holds the device and asks who else has it; a reader's claim asks once, and then shares.


def record_of(device: str, *, readonly: bool) -> Record:
    mount = volumes.DeferredMount(
        devices.source(device), "ext4", readonly=readonly, capacity_bytes=64 * MIB
    )
    key = volumes.VolumeKey(volumes.DriverName("d"), volumes.VolumeId("v"))
    return Record.of(mount, key, volumes.TargetPath("/t"), volumes.HandlerName("kata"))


def test_claim_beside_a_host_writer_is_refused(partition: tuple[str, str], mountpoint: str) -> None:
    disk, part = partition
    run("mount", part, mountpoint)
    with raised("DeviceMountedOnHost"):
        claim.hold_device(record_of(disk, readonly=True))
    run("mount", "-o", "remount,ro", mountpoint)
    os.close(claim.hold_device(record_of(disk, readonly=True)))


def test_claims_of_readers_share_device_and_exclude_a_writer(disk: str) -> None:
    first = claim.hold_device(record_of(disk, readonly=True))
    second = claim.hold_device(record_of(disk, readonly=True))
    os.close(first)
    os.close(second)
    writer = claim.hold_device(record_of(disk, readonly=False))
    with pytest.raises(holders.DeviceInUse):
        claim.hold_device(record_of(disk, readonly=True))
    os.close(writer)


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
