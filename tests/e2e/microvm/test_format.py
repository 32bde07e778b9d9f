"""The guest makes the filesystem of a volume that was created empty, and of no other (specs/handoff.md, H-47)."""

import asyncio
import hashlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from crust.core import errors, volumes
from examples.kata.vm import machine, values
from tests.e2e.microvm.conftest import MIB, SMALLEST, shell

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

EMPTY = volumes.GuestFormat()


@pytest_asyncio.fixture(loop_scope="session")
async def disk(vm: machine.Machine, blank: Path) -> AsyncIterator[str]:
    """The serial number of the blank disk, attached."""
    await vm.attach("blank", blank)
    yield "blank"
    await vm.detach("blank")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("fstype", sorted(SMALLEST))
async def test_blank_disk_is_formatted_once(
    vm: machine.Machine, blank: Path, disk: str, fstype: str
) -> None:
    wanted = values.VolumeMount(disk, fstype, format=EMPTY)
    bind = values.Bind(disk, "/data")
    await vm.guest.mount(wanted)
    await shell(vm, "echo kept > /data/file", bind)
    await vm.guest.unmount(disk)
    await vm.guest.mount(wanted)
    assert await shell(vm, "cat /data/file", bind) == "kept\n"


async def test_options_of_mkfs_are_those_of_the_record(
    vm: machine.Machine, blank: Path, disk: str
) -> None:
    chosen = volumes.GuestFormat(ext4_bytes_per_inode=65536, ext4_reserved_percent=5)
    await vm.guest.mount(values.VolumeMount(disk, "ext4", format=chosen))
    await vm.guest.unmount(disk)
    argv = ["dumpe2fs", "-h", str(blank)]
    dump = await asyncio.to_thread(subprocess.run, argv, check=True, capture_output=True, text=True)
    found = dict(line.split(":", 1) for line in dump.stdout.splitlines() if ":" in line)
    blocks, reserved = int(found["Block count"]), int(found["Reserved block count"])
    assert int(found["Inode count"]) == 512 * MIB // 65536
    assert round(100 * reserved / blocks) == 5


async def test_blank_disk_of_a_volume_that_was_not_created_empty_is_not_formatted(
    vm: machine.Machine, blank: Path, disk: str
) -> None:
    before = digest(blank)
    with pytest.raises(errors.CrustError, match="mounting"):
        await vm.guest.mount(values.VolumeMount(disk, "ext4"))
    assert digest(blank) == before


async def test_blank_disk_that_is_mounted_read_only_is_not_formatted(
    vm: machine.Machine, blank: Path, disk: str
) -> None:
    before = digest(blank)
    with pytest.raises(errors.CrustError, match="mounting"):
        await vm.guest.mount(values.VolumeMount(disk, "ext4", read_only=True, format=EMPTY))
    assert digest(blank) == before


async def test_disk_with_a_partition_table_at_its_end_is_not_formatted(
    vm: machine.Machine, blank: Path, disk: str
) -> None:
    with blank.open("r+b") as image:
        image.seek(-512, 2)
        image.write(b"EFI PART")
    before = digest(blank)
    with pytest.raises(errors.CrustError, match="mounting"):
        await vm.guest.mount(values.VolumeMount(disk, "xfs", format=EMPTY))
    assert digest(blank) == before


async def test_another_filesystem_than_the_wanted_one_is_not_replaced(
    vm: machine.Machine, blank: Path, disk: str
) -> None:
    argv = ["mkfs.ext4", "-q", str(blank)]
    await asyncio.to_thread(subprocess.run, argv, check=True, capture_output=True)
    before = digest(blank)
    with pytest.raises(errors.CrustError, match="mounting"):
        await vm.guest.mount(values.VolumeMount(disk, "xfs", format=EMPTY))
    assert digest(blank) == before
