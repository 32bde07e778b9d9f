"""Devices by identity, sets of them, what is stacked on them; RBD's kernel client, by a directory like its sysfs."""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crust.blockdriver.host import krbd
from crust.blockdriver.host.krbd import KernelRbd, Login
from crust.core import errors, volumes
from crust.host.block import devices, holders, users
from crust.host.block.device_sets import DeviceSet, device_set
from tests.support.ceph.fake_sysfs_rbd import FSID, FakeSysfs

MIB = 1024 * 1024
SIZE = 300 * MIB


@pytest.fixture
def image(tmp_path: Path) -> str:
    path = tmp_path / "image"
    with path.open("wb") as file:
        file.truncate(SIZE)
    return str(path)


def write(path: str, offset: int, data: bytes = b"\x01") -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, data, offset)
    os.close(fd)


@pytest.mark.parametrize(
    "offset",
    [
        pytest.param(0, id="xfs"),
        pytest.param(511, id="dos"),
        pytest.param(512, id="gpt, lvm"),
        pytest.param(1024 + 0x38, id="ext, f2fs"),
        pytest.param(4096, id="md 1.2, bcache"),
        pytest.param(32768 + 1, id="iso"),
        pytest.param(65536 + 64, id="btrfs"),
        pytest.param(4 * MIB, id="luks2 second header"),
        pytest.param(8193 * 1024 + 0x38, id="ext backup, 1 KiB blocks"),
        pytest.param(64 * MIB + 64, id="btrfs mirror"),
        pytest.param(32768 * 4096 + 0x38, id="ext backup, 4 KiB blocks"),
        pytest.param(SIZE - 512, id="gpt backup"),
        pytest.param(SIZE - 65536, id="md 0.90"),
        pytest.param(SIZE - 1, id="last byte"),
    ],
)
def test_is_blank_with_one_byte_in_a_window_is_false(image: str, offset: int) -> None:
    assert devices.is_blank(image)
    write(image, offset)
    assert not devices.is_blank(image)


@pytest.mark.parametrize("size", [1, 512, 4096 + 1, MIB - 1, MIB + 1, 2 * MIB + 7])
def test_is_blank_reads_odd_sizes_to_the_last_byte(tmp_path: Path, size: int) -> None:
    path = tmp_path / "odd"
    path.write_bytes(bytes(size))
    assert devices.is_blank(str(path))
    write(str(path), size - 1)
    assert not devices.is_blank(str(path))


def test_is_blank_raises_for_device_without_size_or_unreadable(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(errors.NotReady, match="no size"):
        devices.is_blank(str(tmp_path / "empty"))
    with pytest.raises(errors.CrustError):
        devices.is_blank(str(tmp_path))


def test_reads_zero_accepts_windows_from_the_end_and_beyond_it(image: str) -> None:
    write(image, SIZE - 10)
    assert devices.reads_zero(image, [(0, 100), (SIZE, 100), (10 * SIZE, 1)])
    assert not devices.reads_zero(image, [(-10, 1)])


def test_identify_of_a_file_is_refused(image: str) -> None:
    for look in (devices.identify, devices.size_bytes, devices.open_exclusive, devices.is_readonly):
        with pytest.raises(devices.NotABlockDevice):
            look(image)


def test_identify_of_an_absent_device_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(errors.NotFound):
        devices.identify(str(tmp_path / "none"))
    with pytest.raises(errors.NotFound):
        devices.is_blank(str(tmp_path / "none"))


NUMBERS = {
    "sda": ("8:0", 5), "sda1": ("8:1", 5), "sda2": ("8:2", 5), "sdb": ("8:16", 6), "sdb1": ("8:17", 6),
    "dm-0": ("253:0", 7), "dm-1": ("253:1", 8), "dm-2": ("253:2", 9),
}  # fmt: skip


@pytest.fixture
def by_number(tmp_path: Path) -> str:
    """sda and sdb are paths to one disk, mapped as dm-2. sda has two partitions, and sdb shows the first; dm-0 and
    dm-1 lie on sda2.
    """
    (tmp_path / "numbers").mkdir()
    places = {
        name: tmp_path
        / "devices"
        / (f"{name[:3]}/{name}" if name[:2] == "sd" and name[3:] else name)
        for name in NUMBERS
    }
    for name, (number, sequence) in NUMBERS.items():
        places[name].mkdir(parents=True, exist_ok=True)
        (places[name] / "dev").write_text(f"{number}\n")
        (tmp_path / "numbers" / number).symlink_to(places[name])
        if name[:2] == "sd" and name[3:]:
            (places[name] / "partition").write_text(f"{name[3:]}\n")
        else:
            (places[name] / "diskseq").write_text(f"{sequence}\n")
    for disk in ("sda", "sdb"):
        (places[disk] / "device").mkdir()
        (places[disk] / "device" / "wwid").write_text("naa.600140512345678\n")
    for below, above in (("sda2", "dm-0"), ("sda2", "dm-1"), ("sda", "dm-2"), ("sdb", "dm-2")):
        for holder, link, held in ((below, "holders", above), (above, "slaves", below)):
            (places[holder] / link).mkdir(exist_ok=True)
            (places[holder] / link / held).symlink_to(places[held])
    return str(tmp_path / "numbers")


def _set(name: str, by_number: str) -> DeviceSet:
    number, sequence = NUMBERS[name]
    major, minor = map(int, number.split(":"))
    return device_set(volumes.DeviceIdentity(major, minor, sequence), by_number=by_number)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("sda", "sda1"),
        ("sda", "dm-0"),
        ("sda2", "dm-0"),
        ("sda", "sdb"),
        ("sda1", "sdb"),
        ("sdb", "dm-2"),
        ("sda1", "sda1"),
        ("sda1", "sdb1"),
    ],
)
def test_devices_that_share_bytes_are_related(by_number: str, one: str, other: str) -> None:
    assert _set(one, by_number).shares_bytes_with(_set(other, by_number))
    assert _set(other, by_number).shares_bytes_with(_set(one, by_number))


@pytest.mark.parametrize(
    ("one", "other"), [("sda1", "sda2"), ("sda2", "sdb1"), ("dm-0", "dm-1"), ("sda1", "dm-0")]
)
def test_devices_beside_one_another_share_nothing(by_number: str, one: str, other: str) -> None:
    assert not _set(one, by_number).shares_bytes_with(_set(other, by_number))


def test_device_whose_number_was_given_to_another_is_alone(by_number: str) -> None:
    gone = volumes.DeviceIdentity(8, 0, 4)
    assert device_set(gone, by_number=by_number) == DeviceSet.alone(gone)
    assert not device_set(gone, by_number=by_number).shares_bytes_with(_set("sda", by_number))


def test_names_that_are_no_standards_join_no_two_disks(by_number: str, tmp_path: Path) -> None:
    for disk in ("sda", "sdb"):
        (tmp_path / "devices" / disk / "device" / "wwid").write_text("t10.ATA     DISK\n")
    assert not _set("sda1", by_number).shares_bytes_with(_set("sdb", by_number))


def test_partition_of_disk_whose_name_ends_in_digit_is_related(tmp_path: Path) -> None:
    numbers, disk = tmp_path / "numbers", tmp_path / "devices" / "nvme0n1"
    numbers.mkdir()
    for place, number in ((disk, "259:0"), (disk / "nvme0n1p1", "259:1")):
        place.mkdir(parents=True)
        (place / "dev").write_text(f"{number}\n")
        (numbers / number).symlink_to(place)
    (disk / "diskseq").write_text("3\n")
    (disk / "nvme0n1p1" / "partition").write_text("1\n")
    whole, part = (
        device_set(volumes.DeviceIdentity(259, minor, 3), by_number=str(numbers))
        for minor in (0, 1)
    )
    assert whole.shares_bytes_with(part)
    assert part.shares_bytes_with(whole)


NUMBER = (7, 3)


@pytest.fixture
def holders_of(tmp_path: Path) -> Path:
    """A loop device that nobody holds yet."""
    (tmp_path / "numbers" / "7:3" / "holders").mkdir(parents=True)
    return tmp_path / "numbers"


def hold(holders_of: Path, name: str, *, map_name: str = "") -> None:
    """Build the device `name` upon it: a map with a name of its own, or an array."""
    device = holders_of.parent / "devices" / name
    device.mkdir(parents=True)
    if map_name:
        (device / "dm").mkdir()
        (device / "dm" / "name").write_text(f"{map_name}\n")
    (holders_of / "7:3" / "holders" / name).symlink_to(device)


def test_in_use_names_map_and_array_upon_it(holders_of: Path) -> None:
    hold(holders_of, "dm-0", map_name="data-one")
    hold(holders_of, "md127")
    stacked = users.stacked_on(NUMBER, by_number=str(holders_of))
    error = holders.DeviceInUse("/dev/loop3", stacked=stacked)
    assert error.is_explained
    assert error.why == "part of dm-0 (data-one), md127"


def test_holder_of_a_partition_is_found(holders_of: Path) -> None:
    partition = holders_of / "7:3" / "loop3p1"
    (partition / "holders").mkdir(parents=True)
    (partition / "partition").write_text("1\n")
    (partition / "holders" / "md0").symlink_to(holders_of)
    assert users.stacked_on(NUMBER, by_number=str(holders_of)) == ("md0",)
    assert users.stacked_on((7, 4), by_number=str(holders_of)) == (), "it is gone"


IMAGE = volumes.NetworkImage(FSID, "rbd", "space", "volume-1", (), "")
KEY = "QVFCa2V5"
LOGIN = Login(["192.0.2.1:3300", "192.0.2.2:3300"], "prefer-crc", "node", KEY)


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    made = FakeSysfs(tmp_path / "rbd")
    made.load()
    return made


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bytes]]:
    """The keys that the kernel was given."""
    given: list[tuple[str, str, bytes]] = []

    @contextlib.contextmanager
    def thread_key(kind: str, description: str, payload: bytes) -> Iterator[None]:
        given.append((kind, description, payload))
        yield

    monkeypatch.setattr(krbd, "thread_key", thread_key)
    return given


@pytest.fixture
def kernel(sysfs: FakeSysfs, keys: object) -> KernelRbd:
    return KernelRbd("node-a", str(sysfs.bus), sysfs.write, lambda: None)


def test_kernel_that_maps_nothing_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is loaded first, if it can be."""
    fake = FakeSysfs(tmp_path / "absent")
    kernel = KernelRbd("node-a", str(fake.bus), fake.write, lambda: None)
    monkeypatch.setattr(krbd, "sees_host_network", lambda: True)
    assert "no driver for RBD" in kernel.obstacle()
    assert replace(kernel, load_module=fake.load).obstacle() == ""
    monkeypatch.setattr(krbd, "sees_host_network", lambda: False)
    assert "hostPID" in kernel.obstacle()


def test_image_is_mapped_with_own_client_and_no_visible_key(
    kernel: KernelRbd, sysfs: FakeSysfs, keys: list[tuple[str, str, bytes]]
) -> None:
    mapping = kernel.map(IMAGE, LOGIN, readonly=False)
    assert mapping.image == IMAGE
    assert not mapping.is_readonly
    [line] = sysfs.lines
    monitors, options, pool, image, snapshot = line.split(" ")
    assert monitors == "192.0.2.1:3300,192.0.2.2:3300"
    assert {"noshare", "name=node", "_pool_ns=space", "ms_mode=prefer-crc"} <= set(
        options.split(",")
    )
    assert not {"exclusive", "ro"} & set(options.split(","))
    assert (pool, image, snapshot) == ("rbd", "volume-1", "-")
    assert KEY not in line
    [(kind, name, payload)] = keys
    assert (kind, payload) == ("ceph", b"AQBkey")
    assert name.startswith("crust.rbd.")
    assert name.endswith(".volume-1")
    assert kernel.find(IMAGE) == mapping


def test_mapping_of_reader_is_read_only_and_follows_new_size(kernel: KernelRbd) -> None:
    mapping = kernel.map(IMAGE, LOGIN, readonly=True)
    assert mapping.is_readonly
    assert kernel.size_bytes(mapping) == 1024
    kernel.refresh(mapping)
    assert kernel.size_bytes(mapping) == 2048


def test_mappings_of_other_images_are_not_found(kernel: KernelRbd, sysfs: FakeSysfs) -> None:
    sysfs.add_foreign(0, IMAGE.image)
    assert kernel.find(replace(IMAGE, namespace="")) is None
    kernel.map(IMAGE, LOGIN, readonly=False)
    assert kernel.find(replace(IMAGE, namespace="elsewhere")) is None
    assert kernel.find(replace(IMAGE, cluster="another")) is None
    assert replace(kernel, owner="node-b").find(IMAGE) is None, "a container of the same kernel"
    assert kernel.find(IMAGE) is not None


def test_unmapping_is_idempotent_and_never_forced(
    kernel: KernelRbd, sysfs: FakeSysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "node_of", lambda _: "/dev/rbd0")
    monkeypatch.setattr(users, "in_use", holders.DeviceInUse)
    mapping = kernel.map(IMAGE, LOGIN, readonly=False)
    sysfs.opened.add(mapping.number)
    with pytest.raises(holders.DeviceInUse, match="/dev/rbd0 is in use"):
        kernel.unmap(mapping)
    assert kernel.find(IMAGE) == mapping
    sysfs.opened.clear()
    kernel.unmap(mapping)
    kernel.unmap(mapping)
    assert kernel.find(IMAGE) is None


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.ENXIO, "features that this kernel does not know"),
        (errno.EACCES, "refuses the user"),
        (errno.ENOENT, "does not exist"),
        (errno.ETIMEDOUT, "did not answer"),
        (errno.EINVAL, "ms_mode"),
    ],
)
def test_refusal_of_kernel_explains_its_errno_without_the_key(
    kernel: KernelRbd, sysfs: FakeSysfs, number: int, why: str
) -> None:
    sysfs.fails = number
    with pytest.raises(krbd.KernelRefusesImage, match=why) as caught:
        kernel.map(IMAGE, LOGIN, readonly=False)
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None
    assert kernel.find(IMAGE) is None


def test_features_are_named(kernel: KernelRbd) -> None:
    assert kernel.unsupported(0x3D) == ()
    assert kernel.unsupported(0x3D | 1 << 6 | 1 << 40) == ("journaling", "bit 40")


@pytest.mark.parametrize("bad", ["a b", "a,b", "a\n", "x=y"])
def test_no_word_can_become_an_option(kernel: KernelRbd, sysfs: FakeSysfs, bad: str) -> None:
    for image, login in (
        (replace(IMAGE, pool=bad), LOGIN),
        (replace(IMAGE, namespace=bad), LOGIN),
        (IMAGE, Login(["192.0.2.1:3300"], "prefer-crc", bad, KEY)),
        (IMAGE, Login([bad], "prefer-crc", "node", KEY)),
    ):
        with pytest.raises(errors.InvalidRequest):
            kernel.map(image, login, readonly=False)
    assert sysfs.lines == []


def test_key_that_is_no_key_is_refused_without_being_shown(kernel: KernelRbd) -> None:
    with pytest.raises(errors.Refused) as caught:
        kernel.map(IMAGE, Login(["192.0.2.1:3300"], "prefer-crc", "node", "no*key"), readonly=False)
    assert "no*key" not in str(caught.value)
