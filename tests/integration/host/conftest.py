"""Real files, loop devices and mountpoints, removed after each test."""

import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crust.host.block import loop
from crust.host.mounts import mount_api

MIB = 1024 * 1024

Attach = Callable[..., loop.LoopDevice]
MakeFile = Callable[..., str]


def run(*argv: str) -> None:
    """Run a program that must succeed."""
    subprocess.run(argv, check=True, capture_output=True, timeout=60)


def write(path: str, offset: int, data: bytes) -> None:
    """Write into a file or device."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def read(path: str, offset: int, length: int) -> bytes:
    """Read from a file or device."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


def partition_table(*, sectors: int) -> bytes:
    """The first sector of a disk with one Linux partition, from 1 MiB on."""
    entry = struct.pack("<B3sB3sII", 0, b"", 0x83, b"", 2048, sectors)
    return bytes(446) + entry + bytes(48) + b"\x55\xaa"


_IMAGE = f"volume-{os.getpid()}.img"
"""`loop.find` opens the devices of all files of one name: of another worker's, too, if they had this name."""


@pytest.fixture
def sparse_file(tmp_path: Path) -> MakeFile:
    """Make a sparse file of a size in bytes, and give its path."""

    def make(size_bytes: int = 64 * MIB, name: str = _IMAGE) -> str:
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(size_bytes)
        return str(path)

    return make


@pytest.fixture
def attach(sparse_file: MakeFile) -> Iterator[Attach]:
    """Attach a new sparse file to a loop device; detached after the test, whatever became of it."""
    files: list[str] = []

    def make(size_bytes: int = 64 * MIB, name: str = _IMAGE) -> loop.LoopDevice:
        files.append(sparse_file(size_bytes, name))
        return loop.attach(files[-1])

    yield make
    for file in files:
        for device in loop.find(file):
            loop.detach(device)


@pytest.fixture
def mountpoint(tmp_path: Path, attach: Attach) -> Iterator[str]:  # attach: unmount before detaching
    """An empty directory; whatever is mounted there goes after the test."""
    path = tmp_path / "target"
    path.mkdir()
    yield str(path)
    mount_api.unmount(str(path))
