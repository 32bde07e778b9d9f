"""How many filesystems the kernel can have mounted, as far as memory, threads and mounts limit it.

Measured on Linux 6.18, for a loop device with a fresh, mounted filesystem: ext4 takes 0.1 MiB of kernel memory and 2
threads, xfs 0.5 MiB and 8, btrfs 5 MiB and 15. Which filesystems will come is not known, so the largest counts.
Volumes may use a quarter of the node's memory, and half of its threads and mounts.
"""

import functools
import os

from crust.host.process import oserrors, sysfs

_MEMORY_BYTES = 5 * 1024 * 1024
_THREADS = 16
_MOUNTS = 2
"""The target, and the bind of it into a container."""


def estimate(*, memory_bytes: int, threads: int, mounts: int) -> int:
    """The number of volumes for a node with these resources, at least one."""
    fit = (
        memory_bytes // 4 // _MEMORY_BYTES,
        threads // 2 // _THREADS,
        mounts // 2 // _MOUNTS,
    )
    return max(min(fit), 1)


@functools.cache
def max_volumes() -> int:
    """The number of volumes for this node; the kernel is asked once."""
    with oserrors.translating("cannot read the kernel's limits"):
        threads = min(_number("kernel/pid_max"), _number("kernel/threads-max"))
        mounts = _number("fs/mount-max")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return estimate(memory_bytes=memory_bytes, threads=threads, mounts=mounts)


def _number(name: str) -> int:
    return int(sysfs.read(f"/proc/sys/{name}"))
