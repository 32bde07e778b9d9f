"""What tests of several parts have: loop devices on sparse files."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crust.host.block import loop
from tests.support.co import MIB
from tests.support.drivers import remnants

MakeDevice = Callable[..., loop.LoopDevice]


@pytest.fixture
def short_dir(short_dir: Path) -> Iterator[Path]:
    """What a failed test left in it is removed."""
    yield short_dir
    remnants.remove(short_dir)


@pytest.fixture
def device(short_dir: Path) -> Iterator[MakeDevice]:
    """Make a loop device on the file of a name; a second call with that name attaches the same file again."""
    made: dict[str, loop.LoopDevice] = {}

    def make(name: str = "a", size_bytes: int = 64 * MIB) -> loop.LoopDevice:
        if name in made:
            loop.detach(made.pop(name))
        with open(short_dir / name, "ab") as file:
            file.truncate(size_bytes)
        made[name] = loop.attach(f"{short_dir}/{name}")
        return made[name]

    yield make
    remnants.remove(short_dir)
    assert remnants.devices(short_dir) == []


@pytest.fixture
def ext4_device(device: MakeDevice) -> loop.LoopDevice:
    """One of 64 MiB with an ext4 on it."""
    made = device("ext4.img")
    subprocess.run(["mkfs.ext4", "-q", made.path], check=True, timeout=60)
    return made
