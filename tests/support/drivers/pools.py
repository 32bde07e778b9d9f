"""A filesystem of its own for a pool of volumes, in a file that is mounted by loop."""

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crust.blockdriver import guests
from crust.host.block import loop
from crust.host.mounts import mount_api
from tests.support.drivers import remnants
from tests.support.drivers.block_driver import MIB, Bench

_MKFS = {
    "xfs": ("mkfs.xfs", "-q", "-K", "-m", "reflink=1"),
    "btrfs": ("mkfs.btrfs", "-q"),
    "ext4": ("mkfs.ext4", "-q", "-m", "0"),
}


_SHUTDOWN = 0x8004587D
"""The ioctl of ext4 and xfs by which they do what they do when their device fails."""


def fail(mountpoint: Path) -> None:
    """Have the filesystem answer with errors from now on, as after an error of its disk."""
    directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(directory, _SHUTDOWN, struct.pack("I", 2))  # without a flush of its log
    finally:
        os.close(directory)


@contextmanager
def mounted(fs_type: str, base: Path, home: Path, *, size: int) -> Iterator[None]:
    """A new filesystem in a file below `base`, mounted at `home`; unmounted and removed when the block is left."""
    backing = base / "pool.backing"
    with backing.open("wb") as file:
        file.truncate(size)
    subprocess.run([*_MKFS[fs_type], str(backing)], check=True, capture_output=True)
    home.mkdir()
    with mounted_from(backing, fs_type, home):
        yield


@contextmanager
def mounted_from(backing: Path, fs_type: str, home: Path) -> Iterator[None]:
    """The filesystem in a file, mounted; unmounted, and the file removed, when the block is left."""
    device = loop.attach(str(backing), once=True)
    try:
        mount_api.mount_device(device.path, str(home), fs_type)
        try:
            yield
        finally:
            mount_api.unmount(str(home))
    finally:
        loop.detach(device)
        backing.unlink()


@contextmanager
def bench_on(
    fs_type: str, root: Path, *, size: int = 3072 * MIB, runtime_guests: guests.Guests | None = None
) -> Iterator[Bench]:
    """A driver whose pool is on a new filesystem. Everything is removed afterwards."""
    home = root / "home"
    with mounted(fs_type, root, home, size=size):
        bench = Bench(home, runtime_guests=runtime_guests)
        try:
            yield bench
        finally:
            bench.let_go()
            remnants.remove(home)
