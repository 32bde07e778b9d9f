"""How many filesystems a kernel can have mounted, by what it limits: memory, threads, mounts.

Measured on Linux 6.18, a loop device and a fresh filesystem on it, mounted: ext4 takes 0.1 MiB of the kernel's own
memory and 2 threads, xfs 0.5 MiB and 8, btrfs 5 MiB and 15. Which filesystems come is not known beforehand, so the
largest counts. And volumes are not what a node is for: they get a quarter of its memory, and half of the rest.
"""

import functools
import os

from crust.host.process import oserrors, sysfs

_MEMORY_BYTES = 5 * 1024 * 1024
_THREADS = 16
_MOUNTS = 2
"""A target, and a bind of it that a pod's container makes."""


def estimate(*, memory_bytes: int, threads: int, mounts: int) -> int:
    """How many volumes fit on a node of so much of each; one at least."""
    fit = (
        memory_bytes // 4 // _MEMORY_BYTES,
        threads // 2 // _THREADS,
        mounts // 2 // _MOUNTS,
    )
    return max(min(fit), 1)


@functools.cache
def max_volumes() -> int:
    """How many volumes fit on this node; asked of the kernel once."""
    with oserrors.translating("cannot read the kernel's limits"):
        threads = min(_number("kernel/pid_max"), _number("kernel/threads-max"))
        mounts = _number("fs/mount-max")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return estimate(memory_bytes=memory_bytes, threads=threads, mounts=mounts)


def _number(name: str) -> int:
    return int(sysfs.read(f"/proc/sys/{name}"))
