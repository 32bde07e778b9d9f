"""A handoff directory, loop devices that records can name, and a directory short enough for sockets."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crust import volumes
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host.block import loop
from tests.support.records import MOUNT, a_record

MakeDevice = Callable[[str], loop.LoopDevice]
SIZE_BYTES = 64 * 1024 * 1024


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty handoff directory."""
    made = Store(f"{tmp_path}/run/volumes")
    made.open()
    return made


@pytest.fixture
def device(tmp_path: Path) -> Iterator[MakeDevice]:
    """Make a loop device on a sparse file of a name; a second call with the same name attaches the same file
    again.
    """
    made: dict[str, loop.LoopDevice] = {}

    def make(name: str) -> loop.LoopDevice:
        if name in made:
            loop.detach(made.pop(name))
        with open(tmp_path / name, "ab") as file:
            file.truncate(SIZE_BYTES)
        made[name] = loop.attach(f"{tmp_path}/{name}")
        return made[name]

    yield make
    for attached in made.values():
        loop.detach(attached)


@pytest.fixture
def run_dir() -> Iterator[str]:
    """A directory for sockets: unix(7) allows 107 bytes, and pytest's own directories are long."""
    path = tempfile.mkdtemp(prefix="crust-")
    yield path
    shutil.rmtree(path)


def record_of(
    attached: loop.LoopDevice, target: volumes.TargetPath | str, *, readonly: bool = False
) -> Record:
    """A record of a real device."""
    record = a_record(target, readonly=readonly)
    source = volumes.BlockSource(attached.path, attached.identity)
    return replace(record, mount=replace(MOUNT, source=source, readonly=readonly, group=None))
