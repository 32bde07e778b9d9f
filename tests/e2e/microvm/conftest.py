"""One VM for all tests of the microVM that neither end nor restart it, and what is plugged into it and run there."""

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from crust.core import errors
from examples.kata.guest import image
from examples.kata.vm import machine, spec, values

MIB = 1024 * 1024

_MKFS = {
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}
SMALLEST = {"ext4": 64 * MIB, "xfs": 320 * MIB, "btrfs": 256 * MIB}
"""Sizes that each mkfs accepts."""

MountDisk = Callable[..., Awaitable[str]]


@pytest.fixture
def vm_directory() -> Iterator[Path]:
    """A place for one VM, short enough for a socket's name. Whatever runs there is destroyed after the test."""
    with _place() as place:
        yield place


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vm(
    guest_image: image.GuestImage, acceleration: spec.Acceleration
) -> AsyncIterator[machine.Machine]:
    """A VM that tests share; each unplugs what it has plugged."""
    with _place() as place:
        wanted = spec.MachineSpec("tests", guest_image, acceleration, volume_slots=6)
        running = await machine.start(wanted, place)
        yield running
        if running.runs():
            await running.stop()


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="crust-vm-"))
    try:
        yield place
    finally:
        with contextlib.suppress(errors.CrustError):
            asyncio.run(machine.destroy(place)) if not _on_loop() else None
        shutil.rmtree(place, ignore_errors=True)


def _on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def make_disk(path: Path, fstype: str, size_bytes: int = 0) -> Path:
    """A sparse file with a filesystem; blank if `fstype` is empty."""
    with path.open("wb") as file:
        file.truncate(size_bytes or SMALLEST.get(fstype, 64 * MIB))
    if fstype:
        subprocess.run([*_MKFS[fstype], str(path)], check=True, capture_output=True)
    return path


_numbers = itertools.count()


@pytest_asyncio.fixture(loop_scope="session")
async def plug(vm: machine.Machine, tmp_path: Path) -> AsyncIterator[MountDisk]:
    """Makes a disk with a filesystem, plugs it and returns its serial number; unplugged after the test."""
    plugged: list[str] = []

    async def make(fstype: str, size_bytes: int = 0, *, read_only: bool = False) -> str:
        serial = f"v{next(_numbers)}"
        source = await asyncio.to_thread(make_disk, tmp_path / serial, fstype, size_bytes)
        await vm.attach(serial, source, read_only=read_only)
        plugged.append(serial)
        return serial

    yield make
    for row in await vm.guest.containers():
        container = await vm.guest.attach(row.container)
        await container.kill()
        await container.wait()
        await container.release()
    for serial in plugged:
        await vm.detach(serial)


@pytest_asyncio.fixture(loop_scope="session")
async def mounted(vm: machine.Machine, plug: MountDisk) -> MountDisk:
    """Like `plug`, and mounts it read-write."""

    async def make(fstype: str = "ext4", size_bytes: int = 0) -> str:
        serial = await plug(fstype, size_bytes)
        await vm.guest.mount(values.VolumeMount(serial, fstype))
        return serial

    return make


async def shell(vm: machine.Machine, script: str, *binds: values.Bind) -> str:
    """Run a shell script in a container and return what it printed; a script that fails fails the test."""
    done = await attempt(vm, script, *binds)
    assert done.exit == values.Exit(0, None), (done, vm.console.tail())
    return done.stdout.decode()


async def attempt(vm: machine.Machine, script: str, *binds: values.Bind) -> values.Completed:
    """Run a shell script in a container; it may fail."""
    wanted = values.ContainerSpec(f"c{next(_numbers)}", ("sh", "-ec", script), binds)
    return await vm.guest.run(wanted, timeout_s=50)


@pytest.fixture
def blank(tmp_path: Path) -> Path:
    """The path of an empty image of a disk."""
    path = tmp_path / "disk"
    with path.open("wb") as image:
        image.truncate(512 * MIB)
    return path
