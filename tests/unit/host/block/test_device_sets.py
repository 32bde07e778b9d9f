"""Sets of devices that share bytes: partitions, maps, paths to one disk."""

from pathlib import Path

import pytest

from crust.core import volumes
from crust.host.block.device_sets import DeviceSet, device_set

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
