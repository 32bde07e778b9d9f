"""Runs on a node with a kernel of its own (`kernel_node`): what io.max makes of `crust.host.cgroups.io_max`.

Prints one line of JSON. The disks are virtual ones without content.
"""

import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crust.core.volumes import DeviceIdentity, IoLimits
from crust.host.cgroups.io_max import IoMax

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


def device_of(name: str) -> DeviceIdentity:
    major, minor = map(int, Path(f"/sys/block/{name}/dev").read_text().split(":"))
    return DeviceIdentity(major, minor, 0)


def obstacles() -> list[str]:
    """The obstacles to limits, from a bare hierarchy to one that is ready."""
    found = [IoMax(ROOT, ("",)).obstacle(), IoMax(ROOT, ("pods",)).obstacle()]
    os.mkdir(PODS)
    found.append(IoMax(ROOT, ("pods",)).obstacle())
    Path(f"{ROOT}/cgroup.subtree_control").write_text("+io")
    found.append(IoMax(ROOT, ("pods",)).obstacle())
    return found


def after_set() -> list[Any]:
    """The content of io.max after each change, and the limits read back from it."""
    throttle = IoMax(ROOT, ("absent", "pods"))
    one, other = device_of("vda"), device_of("vdb")
    throttle.set(other, IoLimits(write_iops=77))
    found: list[Any] = []
    for limits in (IoLimits(3000, 4000, 5 << 20, 6 << 20), IoLimits(write_iops=9), IoLimits()):
        throttle.set(one, limits)
        text = Path(f"{PODS}/io.max").read_text()
        lines = [
            splitline
            for splitline in text.splitlines()
            if splitline.startswith(f"{one.major}:{one.minor} ")
        ]
        found.append([lines, asdict(throttle.get(one)), asdict(limits)])
    throttle.set(one, IoLimits(read_iops=1 << 40))
    throttle.set(one, IoLimits())
    found.append(throttle.get(other).write_iops)
    throttle.set(other, IoLimits())
    found.append(Path(f"{PODS}/io.max").read_text())
    return found


def absent() -> list[str]:
    """Limits of an absent device: removing them succeeds, setting them fails."""
    throttle, device = IoMax(ROOT, ("pods",)), DeviceIdentity(259, 77, 0)
    throttle.set(device, IoLimits())
    try:
        throttle.set(device, IoLimits(read_iops=5))
    except OSError as err:
        return [errno.errorcode[err.errno or 0]]
    return []


def operate(fd: int, kind: str, number: int) -> None:
    """One operation through the page cache, which reaches the disk."""
    offset = (number % 256) * BLOCK
    if kind == "r":
        os.posix_fadvise(fd, offset, BLOCK, os.POSIX_FADV_DONTNEED)
        os.pread(fd, BLOCK, offset)
    else:
        os.pwrite(fd, b"\1" * BLOCK, offset)
        os.fdatasync(fd)


def race() -> dict[str, int]:
    """In a child of the limited group: operations on a disk without limits while each limited disk did its own."""
    done = [0]
    seen: dict[str, int] = {}

    def use_free_disk() -> None:
        fd = os.open(f"/dev/{FREE}", os.O_RDWR)
        while len(seen) < len(KINDS):
            operate(fd, "rw"[done[0] % 2], done[0])
            done[0] += 1

    def use_limited_disk(name: str, kind: str) -> None:
        fd = os.open(f"/dev/{name}", os.O_RDWR)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        before = done[0]
        for number in range(OPERATIONS):
            operate(fd, kind[0], number)
        seen[kind] = done[0] - before

    threads = [threading.Thread(target=use_free_disk)]
    threads += [
        threading.Thread(target=use_limited_disk, args=each)
        for each in zip(LIMITED, KINDS, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def limited_race() -> dict[str, int]:
    """The race, with the limits in force."""
    throttle = IoMax(ROOT, ("pods",))
    for name, limits in zip(LIMITED, KINDS.values(), strict=True):
        throttle.set(device_of(name), limits)
    os.mkdir(f"{PODS}/container")
    Path(f"{PODS}/container/cgroup.procs").write_text(str(os.getpid()))
    return race()


if __name__ == "__main__":
    os.mkdir(ROOT)
    subprocess.run(["mount", "-t", "cgroup2", "cgroup2", ROOT], check=True)
    answer = {
        "obstacles": obstacles(),
        "after_set": after_set(),
        "absent": absent(),
        "race": limited_race(),
    }
    sys.stdout.write(json.dumps(answer) + "\n")
