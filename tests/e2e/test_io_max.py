"""Limits by control groups v2, in a kernel that has them: this machine's may have v1 alone.

The VM's PID 1 is the test's own (`io_max_in_guest`); its disks are memory that is thrown away.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from crust.host.cgroups import io_max
from examples.kata.guest import archive, image
from examples.kata.vm import spec
from tests.support.runtimes import io_max_in_guest

pytestmark = [pytest.mark.vm, pytest.mark.timeout(240)]

DISKS = 5
INIT = """#!/usr/bin/python3.11 -ISB
import sys
sys.path.insert(0, "/probe")
import io_max_in_guest
io_max_in_guest.main()
"""


@pytest.fixture(scope="module")
def answer(
    guest_image: image.GuestImage,
    acceleration: spec.Acceleration,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    initramfs = tmp_path_factory.mktemp("io-max") / "initramfs"
    # The kernel unpacks one archive after the other: what is added lies over the image.
    initramfs.write_bytes(guest_image.initramfs.read_bytes() + _probe())
    done = subprocess.run(
        _command(guest_image, initramfs, acceleration),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    _, found, rest = done.stdout.partition("\nANSWER ")
    assert found, (done.stdout[-2000:], done.stderr[-2000:])
    said = json.loads(rest.splitlines()[0])
    assert "error" not in said, said
    return said


def _probe() -> bytes:
    files = {
        "probe/init": (INIT.encode(), True),
        "probe/typing.py": (b"Any = object\n", False),
        "probe/io_max_in_guest.py": (Path(io_max_in_guest.__file__).read_bytes(), False),
        "probe/io_max.py": (Path(io_max.__file__).read_bytes(), False),
    }
    return archive.pack(
        [archive.file(path, data, executable=mode) for path, (data, mode) in files.items()]
    )


def _command(
    guest_image: image.GuestImage, initramfs: Path, acceleration: spec.Acceleration
) -> list[str]:
    wanted = spec.MachineSpec("io-max", guest_image, acceleration, volume_slots=0)
    boot = [
        str(initramfs) if each == str(guest_image.initramfs) else each
        for each in (*spec._machine(wanted), *spec._boot(wanted))
    ]
    at = boot.index("-append") + 1
    boot[at] += " rdinit=/probe/init"
    disks = [
        word
        for number in range(DISKS)
        for word in (
            *("-blockdev", f"driver=null-co,node-name=d{number},size=67108864,read-zeroes=on"),
            *("-device", f"virtio-blk-pci,drive=d{number}"),
        )
    ]
    plain = ("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot")
    return [str(spec.QEMU), *plain, *boot, *disks, "-serial", "stdio"]


def test_obstacle_names_what_is_missing_and_the_remedy(answer: Any) -> None:
    root, group, controller, nothing = answer["obstacles"]
    assert "root group" in root
    assert group == "there is no pods in /run/cgroup"
    assert "write +io to /run/cgroup/cgroup.subtree_control" in controller
    assert nothing == ""


def test_set_replaces_previous_limits(answer: Any) -> None:
    whole, less, none, other, empty = answer["after_set"]
    for lines, read_back, wanted in (whole, less, none):
        assert read_back == wanted, lines
    assert len(whole[0]) == 1
    assert whole[0][0].split()[1:] == ["rbps=5242880", "wbps=6291456", "riops=3000", "wiops=4000"]
    assert less[0][0].split()[1:] == ["rbps=max", "wbps=max", "riops=max", "wiops=9"]
    assert none[0] == []
    assert other == [0, 77, 0, 0]
    assert empty == ""


def test_limits_of_absent_device_are_removed_without_error(answer: Any) -> None:
    assert answer["absent"] == ["ENODEV"]


def test_limits_apply_to_child_groups_and_page_cache(answer: Any) -> None:
    """Also through the page cache: cgroup v2 attributes writeback to the group that wrote the pages."""
    assert set(answer["race"]) == set(io_max_in_guest.KINDS)
    assert all(each >= 10 * io_max_in_guest.OPERATIONS for each in answer["race"].values())
