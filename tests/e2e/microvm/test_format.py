"""The guest formats and encrypts a volume that was created empty, and no other (specs/handoff.md, H-47, H-49)."""

import asyncio
import hashlib
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from crust.core import errors, volumes
from examples.kata.vm import faults, machine, values
from tests.e2e.microvm.conftest import MIB, SMALLEST, shell

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="session")]

EMPTY = volumes.GuestFormat()


@pytest_asyncio.fixture(loop_scope="session")
async def disk(vm: machine.Machine, blank: Path) -> AsyncIterator[str]:
    """The serial number of the blank disk, attached."""
    await vm.attach("blank", blank)
    yield "blank"
    await vm.detach("blank")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def test_options_of_mkfs_are_those_of_the_record(
    vm: machine.Machine, blank: Path, disk: str
) -> None:
    chosen = volumes.GuestFormat(ext4_bytes_per_inode=65536, ext4_reserved_percent=5)
    await vm.guest.mount(values.VolumeMount(disk, "ext4", format=chosen))
    await vm.guest.unmount(disk)
    argv = ["dumpe2fs", "-h", str(blank)]
    dump = await asyncio.to_thread(subprocess.run, argv, check=True, capture_output=True, text=True)
    fields = dict(line.split(":", 1) for line in dump.stdout.splitlines() if ":" in line)
    blocks, reserved = int(fields["Block count"]), int(fields["Reserved block count"])
    assert int(fields["Inode count"]) == 512 * MIB // 65536
    assert round(100 * reserved / blocks) == 5


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


@pytest.mark.parametrize(
    "wanted",
    [
        values.VolumeMount("blank", "ext4", read_only=True, format=EMPTY),
        encrypted(read_only=True),
        encrypted(format=None),
    ],
    ids=["read-only", "encrypted and read-only", "encrypted and not created empty"],
)
async def test_disk_is_not_formatted(
    vm: machine.Machine, blank: Path, disk: str, wanted: values.VolumeMount
) -> None:
    before = digest(blank)
    with pytest.raises(errors.CrustError, match=r"mounting|opening the LUKS container"):
        await vm.guest.mount(wanted)
    assert digest(blank) == before


@pytest.mark.spec("H-49")
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


async def test_open_container_needs_no_passphrase_and_is_closed_by_unmount(
    vm: machine.Machine, blank: Path, disk: str
) -> None:
    await vm.guest.mount(encrypted())
    await shell(vm, "echo kept > /data/file", BIND)
    await vm.guest.mount(encrypted(None))
    assert await shell(vm, "cat /data/file", BIND) == "kept\n"
    assert await vm.guest.unmount(disk)
    with pytest.raises(faults.GuestNeedsPassphrase):
        await vm.guest.mount(encrypted(None))
