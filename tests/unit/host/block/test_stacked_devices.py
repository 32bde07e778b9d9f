"""crust.host.block.stacked_devices on a tree as sysfs has it: a volume group, an array, a map, partitions."""

import os
from pathlib import Path

import pytest

from crust.host.block import holders, loop, stacked_devices

NUMBER = os.makedev(7, 3)


@pytest.fixture
def by_number(tmp_path: Path) -> Path:
    """A loop device that nobody holds yet."""
    (tmp_path / "numbers" / "7:3" / "holders").mkdir(parents=True)
    return tmp_path / "numbers"


def hold(
    by_number: Path, name: str, *, map_name: str = "", uuid: str = "", kind: str = "dm"
) -> None:
    """Build the device `name` upon it."""
    device = by_number.parent / "devices" / name
    (device / kind).mkdir(parents=True)
    if kind == "dm":
        (device / "dm" / "name").write_text(f"{map_name}\n")
        (device / "dm" / "uuid").write_text(f"{uuid}\n")
    (by_number / "7:3" / "holders" / name).symlink_to(device)


@pytest.mark.parametrize(
    ("map_name", "uuid", "kind", "remedy"),
    [
        ("data-root", "LVM-abc", "LVM volume group data", "vgchange -an data"),
        ("my--group-my--lv", "LVM-abc", "LVM volume group my-group", "vgchange -an my-group"),
        ("mpatha", "mpath-3600", "multipath mpatha", "multipath -f mpatha"),
        ("secret", "CRYPT-LUKS2-1", "device mapper secret", "dmsetup remove secret"),
        ("a; reboot", "LVM-abc", "device mapper", "dmsetup remove /dev/dm-0"),
    ],
)
def test_mapped_device_is_named_with_the_command_that_releases_it(
    by_number: Path, map_name: str, uuid: str, kind: str, remedy: str
) -> None:
    hold(by_number, "dm-0", map_name=map_name, uuid=uuid)
    (found,) = stacked_devices.stacked_on(NUMBER, by_number=str(by_number))
    assert (found.name, found.kind, found.remedy) == ("dm-0", kind, remedy)


def test_array_and_unknown_holder_are_named(by_number: Path) -> None:
    hold(by_number, "md127", kind="md")
    hold(by_number, "bcache0", kind="bcache")
    found = stacked_devices.stacked_on(NUMBER, by_number=str(by_number))
    assert [(each.name, each.remedy) for each in found] == [
        ("bcache0", ""),
        ("md127", "mdadm --stop /dev/md127"),
    ]


def test_holder_of_a_partition_is_found(by_number: Path) -> None:
    partition = by_number / "7:3" / "loop3p1"
    (partition / "holders").mkdir(parents=True)
    (partition / "partition").write_text("1\n")
    (partition / "holders" / "md0").symlink_to(by_number)
    assert len(stacked_devices.stacked_on(NUMBER, by_number=str(by_number))) == 1


def test_device_that_is_gone_has_no_holders(tmp_path: Path) -> None:
    assert stacked_devices.stacked_on(NUMBER, by_number=str(tmp_path)) == ()


def test_device_in_use_names_the_volume_group_and_how_to_release_it(by_number: Path) -> None:
    hold(by_number, "dm-0", map_name="data-one", uuid="LVM-a1")
    stacked = stacked_devices.stacked_on(NUMBER, by_number=str(by_number))
    error = holders.DeviceInUse("/dev/loop3", stacked=stacked)
    assert error.is_explained
    assert error.why == "part of dm-0 (LVM volume group data; vgchange -an data releases it)"


def test_loop_device_held_names_the_volume_group_and_how_to_release_it(by_number: Path) -> None:
    hold(by_number, "md127", kind="md")
    stacked = stacked_devices.stacked_on(NUMBER, by_number=str(by_number))
    error = loop.LoopDeviceHeld("/dev/loop3", holders.DeviceInUse("/dev/loop3", stacked=stacked))
    assert error.why == "part of md127 (md array; mdadm --stop /dev/md127 releases it)"
