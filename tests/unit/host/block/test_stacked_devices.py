"""crust.host.block.holders on a tree as sysfs has it: a volume group, an array, partitions."""

import os
from pathlib import Path

import pytest

from crust.host.block import holders, loop

NUMBER = os.makedev(7, 3)


@pytest.fixture
def by_number(tmp_path: Path) -> Path:
    """A loop device that nobody holds yet."""
    (tmp_path / "numbers" / "7:3" / "holders").mkdir(parents=True)
    return tmp_path / "numbers"


def hold(by_number: Path, name: str, *, map_name: str = "") -> None:
    """Build the device `name` upon it: a map with a name of its own, or an array."""
    device = by_number.parent / "devices" / name
    device.mkdir(parents=True)
    if map_name:
        (device / "dm").mkdir()
        (device / "dm" / "name").write_text(f"{map_name}\n")
    (by_number / "7:3" / "holders" / name).symlink_to(device)


def test_device_in_use_names_the_map_and_the_array_upon_it(by_number: Path) -> None:
    hold(by_number, "dm-0", map_name="data-one")
    hold(by_number, "md127")
    stacked = holders.stacked_on(NUMBER, by_number=str(by_number))
    error = holders.DeviceInUse("/dev/loop3", stacked=stacked)
    assert error.is_explained
    assert error.why == "part of dm-0 (data-one), md127"


def test_holder_of_a_partition_is_found(by_number: Path) -> None:
    partition = by_number / "7:3" / "loop3p1"
    (partition / "holders").mkdir(parents=True)
    (partition / "partition").write_text("1\n")
    (partition / "holders" / "md0").symlink_to(by_number)
    assert holders.stacked_on(NUMBER, by_number=str(by_number)) == ("md0",)


def test_device_that_is_gone_has_no_holders(tmp_path: Path) -> None:
    assert holders.stacked_on(NUMBER, by_number=str(tmp_path)) == ()


def test_loop_device_held_names_the_array_upon_it(by_number: Path) -> None:
    hold(by_number, "md127")
    stacked = holders.stacked_on(NUMBER, by_number=str(by_number))
    error = loop.LoopDeviceHeld("/dev/loop3", holders.DeviceInUse("/dev/loop3", stacked=stacked))
    assert error.why == "part of md127"
