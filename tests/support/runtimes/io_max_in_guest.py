"""Tests that a node with a kernel of its own runs, one after the other (`tests/e2e/test_io_max.py`): io.max.

The disks are virtual ones without content. The machine of the tests may have control groups v1 alone.
"""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from crust.blockdriver.host.throttling import CannotThrottle, Throttle
from crust.core.volumes import DeviceIdentity, IoLimits

ROOT = "/run/cgroup"
PODS = f"{ROOT}/pods"
BLOCK = 4096
OPERATIONS = 12
PER_S = 4
KINDS = {
    "riops": IoLimits(read_iops=PER_S),
    "wiops": IoLimits(write_iops=PER_S),
    "rbps": IoLimits(read_bytes_per_second=PER_S * BLOCK),
    "wbps": IoLimits(write_bytes_per_second=PER_S * BLOCK),
}
*LIMITED, FREE = DISKS = ("vda", "vdb", "vdc", "vdd", "vde")


@pytest.fixture(scope="module", autouse=True)
def _hierarchy() -> None:
    os.mkdir(ROOT)
    subprocess.run(["mount", "-t", "cgroup2", "cgroup2", ROOT], check=True)


def device_of(name: str) -> DeviceIdentity:
    major, minor = map(int, Path(f"/sys/block/{name}/dev").read_text().split(":"))
    return DeviceIdentity(major, minor, 0)


def test_obstacle_names_what_is_missing_and_the_remedy() -> None:
    with pytest.raises(CannotThrottle, match="root group"):
        Throttle("/").check_can_limit()
    throttle = Throttle("pods")
    with pytest.raises(CannotThrottle, match=f"there is no pods in {ROOT}"):
        throttle.check_can_limit()
    os.mkdir(PODS)
    with pytest.raises(CannotThrottle, match=rf"write \+io to {ROOT}/cgroup.subtree_control"):
        throttle.check_can_limit()
    Path(f"{ROOT}/cgroup.subtree_control").write_text("+io")
    throttle.check_can_limit()


def test_set_replaces_previous_limits() -> None:
    throttle = Throttle("pods")
    one, other = device_of("vda"), device_of("vdb")
    throttle.set(other, IoLimits(write_iops=77))
    for limits, line in (
        (IoLimits(3000, 4000, 5 << 20, 6 << 20), "rbps=5242880 wbps=6291456 riops=3000 wiops=4000"),
        (IoLimits(write_iops=9), "rbps=max wbps=max riops=max wiops=9"),
        (IoLimits(), ""),
    ):
        throttle.set(one, limits)
        assert throttle.limits_of(one) == limits
        begin, text = f"{one.major}:{one.minor} ", Path(f"{PODS}/io.max").read_text()
        lines = [of.removeprefix(begin) for of in text.splitlines() if of.startswith(begin)]
        assert lines == [line] * bool(line)
    throttle.set(one, IoLimits(read_iops=1 << 40))
    throttle.set(one, IoLimits())
    assert throttle.limits_of(other).write_iops == 77
    throttle.set(other, IoLimits())
    assert Path(f"{PODS}/io.max").read_text() == ""


def test_limits_of_absent_device_are_removed_without_error() -> None:
    throttle, device = Throttle("pods"), DeviceIdentity(259, 77, 0)
    throttle.look()
    throttle.set(device, IoLimits())
    with pytest.raises(CannotThrottle, match="ENODEV"):
        throttle.set(device, IoLimits(read_iops=5))


def operate(fd: int, kind: str, number: int) -> None:
    """One operation through the page cache, which reaches the disk."""
    offset = (number % 256) * BLOCK
    if kind == "r":
        os.posix_fadvise(fd, offset, BLOCK, os.POSIX_FADV_DONTNEED)
        os.pread(fd, BLOCK, offset)
    else:
        os.pwrite(fd, b"\1" * BLOCK, offset)
        os.fdatasync(fd)


def test_limits_apply_to_child_groups_and_page_cache() -> None:
    """The disk without limits does many operations while each limited disk does its own.

    Also through the page cache: cgroup v2 attributes writeback to the group that wrote the pages.
    """
    throttle = Throttle("pods")
    for name, limits in zip(LIMITED, KINDS.values(), strict=True):
        throttle.set(device_of(name), limits)
    os.mkdir(f"{PODS}/container")
    Path(f"{PODS}/container/cgroup.procs").write_text(str(os.getpid()))
    done, meanwhile = [0], dict[str, int]()

    def use_free_disk() -> None:
        fd = os.open(f"/dev/{FREE}", os.O_RDWR)
        while len(meanwhile) < len(KINDS):
            operate(fd, "rw"[done[0] % 2], done[0])
            done[0] += 1

    def use_limited_disk(name: str, kind: str) -> None:
        fd = os.open(f"/dev/{name}", os.O_RDWR)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        before = done[0]
        for number in range(OPERATIONS):
            operate(fd, kind[0], number)
        meanwhile[kind] = done[0] - before

    threads = [threading.Thread(target=use_free_disk)]
    threads += [
        threading.Thread(target=use_limited_disk, args=of)
        for of in zip(LIMITED, KINDS, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(meanwhile) == set(KINDS)
    assert all(operations >= 10 * OPERATIONS for operations in meanwhile.values()), meanwhile
