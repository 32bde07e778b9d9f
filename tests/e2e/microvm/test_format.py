"""The guest formats and encrypts a volume that was created empty, and no other (specs/handoff.md, H-47, H-49)."""

import asyncio
import hashlib
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from crust.core import errors, volumes
from examples.kata.vm import faults, machine, values
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


@pytest.mark.spec("H-47")
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


def partitioned(blank: Path) -> None:
    """A partition table at its end."""
    with blank.open("r+b") as image:
        image.seek(-512, 2)
        image.write(b"EFI PART")


def made_ext4(blank: Path) -> None:
    subprocess.run(["mkfs.ext4", "-q", str(blank)], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("fill", "fstype", "format", "read_only"),
    [
        pytest.param(None, "ext4", None, False, id="not created empty"),
        pytest.param(None, "ext4", EMPTY, True, id="read-only"),
        pytest.param(partitioned, "xfs", EMPTY, False, id="partition table"),
        pytest.param(made_ext4, "xfs", EMPTY, False, id="another filesystem"),
    ],
)
async def test_disk_is_not_formatted(
    vm: machine.Machine,
    blank: Path,
    disk: str,
    fill: Callable[[Path], None] | None,
    fstype: str,
    format: volumes.GuestFormat | None,
    *,
    read_only: bool,
) -> None:
    if fill is not None:
        await asyncio.to_thread(fill, blank)
    before = digest(blank)
    with pytest.raises(errors.CrustError, match="mounting"):
        await vm.guest.mount(values.VolumeMount(disk, fstype, read_only=read_only, format=format))
    assert digest(blank) == before


PASSPHRASE = "correct horse battery staple"
MARKER = "the plaintext of the file"
BIND = values.Bind("blank", "/data")


def encrypted(
    passphrase: str | None = PASSPHRASE,
    *,
    fstype: str = "ext4",
    format: volumes.GuestFormat | None = EMPTY,
    read_only: bool = False,
) -> values.VolumeMount:
    return values.VolumeMount(
        "blank", fstype, read_only=read_only, format=format, encrypted=True, passphrase=passphrase
    )


@pytest.mark.parametrize("fstype", sorted(SMALLEST))
async def test_blank_disk_gets_a_container_and_holds_no_plaintext(
    vm: machine.Machine, blank: Path, disk: str, fstype: str
) -> None:
    await vm.guest.mount(encrypted(fstype=fstype))
    await shell(vm, f"echo '{MARKER}' > /data/file; sync", BIND)
    await vm.guest.unmount(disk)
    image = blank.read_bytes()
    assert image.startswith(b"LUKS\xba\xbe\x00\x02")
    assert MARKER.encode() not in image
    assert PASSPHRASE.encode() not in image
    await vm.guest.mount(encrypted(fstype=fstype))
    assert await shell(vm, "cat /data/file", BIND) == f"{MARKER}\n"


@pytest.mark.spec("H-49")
async def test_wrong_passphrase_is_an_error_that_says_so_and_changes_nothing(
    vm: machine.Machine, blank: Path, disk: str
) -> None:
    await vm.guest.mount(encrypted())
    await vm.guest.unmount(disk)
    before = digest(blank)
    with pytest.raises(faults.WrongPassphrase, match="the passphrase does not open it"):
        await vm.guest.mount(encrypted("wrong horse"))
    with pytest.raises(faults.GuestNeedsPassphrase):
        await vm.guest.mount(encrypted(None))
    assert digest(blank) == before


async def test_disk_that_was_not_created_empty_is_not_made_a_container(
    vm: machine.Machine, blank: Path, disk: str
) -> None:
    before = digest(blank)
    for wanted in (encrypted(format=None), encrypted(read_only=True)):
        with pytest.raises(errors.CrustError, match="opening the LUKS container"):
            await vm.guest.mount(wanted)
    assert digest(blank) == before


@pytest.mark.parametrize("fstype", ["ext4", "xfs"])
async def test_container_and_filesystem_grow_while_they_are_in_use(
    vm: machine.Machine, blank: Path, disk: str, fstype: str
) -> None:
    mounted = await vm.guest.mount(encrypted(fstype=fstype))
    os.truncate(blank, 1024 * MIB)
    grown = await vm.grow(disk, 1024 * MIB)
    assert grown.total_bytes - mounted.usage.total_bytes > 450 * MIB
    assert (await vm.guest.grow(disk, 1024 * MIB)).usage == await vm.guest.usage(disk)


async def test_container_that_grew_while_it_was_closed_is_filled(
    vm: machine.Machine, blank: Path, disk: str
) -> None:
    mounted = await vm.guest.mount(encrypted())
    await vm.detach(disk)
    os.truncate(blank, 1024 * MIB)
    await vm.attach(disk, blank)
    await vm.guest.mount(encrypted())
    grown = await vm.guest.grow(disk, 1024 * MIB)
    assert grown.usage.total_bytes - mounted.usage.total_bytes > 450 * MIB


async def test_open_container_needs_no_passphrase_and_is_closed_by_the_unmount(
    vm: machine.Machine, blank: Path, disk: str
) -> None:
    await vm.guest.mount(encrypted())
    await shell(vm, "echo kept > /data/file", BIND)
    await vm.guest.mount(encrypted(None))
    assert await shell(vm, "cat /data/file", BIND) == "kept\n"
    assert await vm.guest.unmount(disk)
    with pytest.raises(faults.GuestNeedsPassphrase):
        await vm.guest.mount(encrypted(None))
