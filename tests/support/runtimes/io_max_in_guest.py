"""PID 1 of a VM whose kernel has control groups v2: what its io.max makes of `crust.host.cgroups.io_max`.

The guest's Python has few modules, so the value classes of the code under test are defined here, with the same
names. Prints one line of JSON on the console and powers the guest off.
"""

import collections
import errno
import json
import os
import sys
import threading
import types
from typing import Any  # an empty module in the guest

ROOT = "/run/cgroup"
PODS = f"{ROOT}/pods"
BLOCK = 4096
OPERATIONS = 12
PER_S = 4

IoLimits: Any = collections.namedtuple(
    "IoLimits",
    "read_iops write_iops read_bytes_per_second write_bytes_per_second",
    defaults=(0, 0, 0, 0),
)
Device: Any = collections.namedtuple("Device", "major minor")
KINDS = {
    "riops": IoLimits(read_iops=PER_S),
    "wiops": IoLimits(write_iops=PER_S),
    "rbps": IoLimits(read_bytes_per_second=PER_S * BLOCK),
    "wbps": IoLimits(write_bytes_per_second=PER_S * BLOCK),
}


def module(name: str) -> Any:
    """A module by its name; the guest's importlib is a stub."""
    __import__(name)
    return sys.modules[name]


def under_test() -> Any:
    """The module, with what it imports."""
    core = types.ModuleType("crust.core")
    core.volumes = types.SimpleNamespace(IoLimits=IoLimits, DeviceIdentity=Device)  # type: ignore[attr-defined]
    sys.modules.update({"crust": types.ModuleType("crust"), core.__name__: core})
    return module("io_max")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def device_of(name: str) -> Any:
    return Device(*map(int, read(f"/sys/block/{name}/dev").split(":")))


def obstacles(io_max: Any) -> list[str]:
    """The obstacles to limits, from a bare hierarchy to one that is ready."""
    found = [io_max.IoMax(ROOT, ("",)).obstacle(), io_max.IoMax(ROOT, ("pods",)).obstacle()]
    os.mkdir(PODS)
    found.append(io_max.IoMax(ROOT, ("pods",)).obstacle())
    write(f"{ROOT}/cgroup.subtree_control", "+io")
    found.append(io_max.IoMax(ROOT, ("pods",)).obstacle())
    return found


def after_set(io_max: Any) -> list[Any]:
    """The content of io.max after each change, and the limits read back from it."""
    throttle = io_max.IoMax(ROOT, ("absent", "pods"))
    one, other = device_of("vda"), device_of("vdb")
    throttle.set(other, IoLimits(write_iops=77))
    found: list[Any] = []
    for limits in (IoLimits(3000, 4000, 5 << 20, 6 << 20), IoLimits(write_iops=9), IoLimits()):
        throttle.set(one, limits)
        lines = [
            each
            for each in read(f"{PODS}/io.max").splitlines()
            if each.startswith(f"{one[0]}:{one[1]} ")
        ]
        found.append([lines, list(throttle.get(one)), list(limits)])
    throttle.set(one, IoLimits(read_iops=1 << 40))
    throttle.set(one, IoLimits())
    found.append(list(throttle.get(other)))
    throttle.set(other, IoLimits())
    found.append(read(f"{PODS}/io.max"))
    return found


def absent(io_max: Any) -> list[str]:
    """Limits of an absent device: removing them succeeds, setting them fails."""
    throttle, device = io_max.IoMax(ROOT, ("pods",)), Device(259, 77)
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
        fd = os.open(f"/dev/{free}", os.O_RDWR)
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

    *limited, free = ("vda", "vdb", "vdc", "vdd", "vde")
    threads = [threading.Thread(target=use_free_disk)]
    threads += [
        threading.Thread(target=use_limited_disk, args=each)
        for each in zip(limited, KINDS, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def limited_race(io_max: Any) -> dict[str, int]:
    """The race, with the limits in force."""
    throttle = io_max.IoMax(ROOT, ("pods",))
    for name, limits in zip(("vda", "vdb", "vdc", "vdd"), KINDS.values(), strict=True):
        throttle.set(device_of(name), limits)
    os.mkdir(f"{PODS}/container")
    write(f"{PODS}/container/cgroup.procs", str(os.getpid()))
    return race()


def main() -> None:
    """Be PID 1."""
    sys.path.insert(0, "/crust")
    init, linux = module("agent.init"), module("agent.linux")
    try:
        init.prepare()
        os.mkdir(ROOT)
        linux.mount("cgroup2", ROOT, "cgroup2")
        io_max = under_test()
        answer = {
            "obstacles": obstacles(io_max),
            "after_set": after_set(io_max),
            "absent": absent(io_max),
            "race": limited_race(io_max),
        }
    except BaseException as err:
        answer = {"error": [f"{type(err).__name__}: {err}"]}
    sys.stdout.write(f"\nANSWER {json.dumps(answer)}\n")
    sys.stdout.flush()
    linux.power_off()


if __name__ == "__main__":
    main()
