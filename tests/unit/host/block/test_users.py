"""Who uses a device: what is stacked on it, and where it is mounted."""

import re
from pathlib import Path

import pytest

from crust.host.block import holders, users
from crust.host.mounts import mountinfo

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


def test_busy_device_names_few_own_mount_points_alone() -> None:
    def mount(target: str) -> mountinfo.Mount:
        return mountinfo.Mount(1, 1, 8, 1, "/", target, ("rw",), "ext4", "/dev/sda1", ("rw",))

    own = [("self", mount(f"/a{number}\n\x1b")) for number in range(10)]
    others = [(str(pid), mount(f"/tenant/{pid}")) for pid in (50, 51)]
    text = str(users.mounted_on_host("/dev/sda", [("1", mount("/host")), *own, *others]))
    shown = r"mounted at a path of 2 other mount namespaces \(see /proc/\*/mountinfo\), /a0\\n\\x1b, .* and 7 more;"
    assert re.search(shown, text)
    assert "tenant" not in text
