"""mkfs on real devices, by the real programs."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.host import fsck
from crust.blockdriver.records.models import ContentState
from crust.core import errors
from crust.host.block import devices, holders, signatures, users
from crust.host.filesystems import format_decision, mkfs, superblocks
from crust.host.mounts import mount_api
from crust.host.process import commands
from tests.integration.host.conftest import MIB, Attach, run
from tests.support.probes import probed
from tests.support.raised import raised

pytestmark = pytest.mark.root

SIZES = {"ext4": 64 * MIB, "xfs": 300 * MIB, "btrfs": 256 * MIB}


async def _output(*argv: str) -> str:
    return (await commands.run_command(argv, timeout_s=60)).stdout.decode()


@pytest.mark.parametrize("fs_type", mkfs.SUPPORTED)
async def test_make_on_blank_device_makes_a_clean_mountable_filesystem(
    attach: Attach, mountpoint: str, fs_type: str
) -> None:
    device = attach(SIZES[fs_type])
    assert probed(device.path) == signatures.Blank()
    await mkfs.make(device.path, fs_type)
    made = probed(device.path)
    assert isinstance(made, signatures.Filesystem)
    assert (made.type, len(made.uuid)) == (fs_type, 36)
    assert not await fsck.check_filesystem(device.path, fs_type)
    assert not devices.is_blank(device.path)
    mount_api.mount_device(device.path, mountpoint, fs_type)
    (Path(mountpoint) / "file").write_bytes(b"x")


async def test_make_ext4_has_the_features_that_old_kernels_mount(attach: Attach) -> None:
    """A mke2fs of today would add orphan_file and metadata_csum_seed, which Linux 5.15 does not mount."""
    device = attach(mkfs.TABLE["ext4"].minimum_bytes)
    await mkfs.make(device.path, "ext4")
    assert superblocks.read_ext4(device.path).block_size_bytes == 4096
    listed = await _output("dumpe2fs", "-h", device.path)
    [line] = [line for line in listed.splitlines() if line.startswith("Filesystem features:")]
    assert set(line.partition(":")[2].split()) == {
        *("has_journal", "ext_attr", "resize_inode", "dir_index", "filetype", "extent", "64bit"),
        *("flex_bg", "sparse_super", "large_file", "huge_file", "dir_nlink", "extra_isize"),
        "metadata_csum",
    }


async def test_make_xfs_has_the_features_that_old_kernels_mount(attach: Attach) -> None:
    """xfsprogs 6.5 adds nrext64 and rmapbt by itself, and Linux 5.15 does not mount nrext64."""
    device = attach(mkfs.TABLE["xfs"].minimum_bytes)
    await mkfs.make(device.path, "xfs")
    listed = await _output("xfs_db", "-r", "-c", "version", device.path)
    assert set(listed.partition("= ")[2].strip().split(",")) == {
        *("V5", "NLINK", "DIRV2", "ALIGN", "LOGV2", "EXTFLG", "MOREBITS", "ATTR2", "LAZYSBCOUNT"),
        *("PROJID32BIT", "CRC", "FTYPE", "FINOBT", "SPARSE_INODES", "REFLINK", "INOBTCNT"),
        "BIGTIME",
    }


async def test_make_btrfs_has_the_features_that_old_kernels_mount(attach: Attach) -> None:
    """btrfs-progs 6.19 adds block-group-tree by itself, which Linux 5.15 does not mount."""
    device = attach(mkfs.TABLE["btrfs"].minimum_bytes)
    await mkfs.make(device.path, "btrfs")
    listed = await _output("btrfs", "inspect-internal", "dump-super", device.path)
    flags = listed.partition("compat_ro_flags")[2].partition("cache_generation")[0]
    assert set(re.findall(r"\b[A-Z][A-Z_]+\b", flags)) == {
        *("FREE_SPACE_TREE", "FREE_SPACE_TREE_VALID"),
        *("MIXED_BACKREF", "EXTENDED_IREF", "SKINNY_METADATA", "NO_HOLES"),
    }


@pytest.mark.parametrize("fs_type", mkfs.SUPPORTED)
@pytest.mark.parametrize("present", ["ext4", "xfs", "btrfs"])
async def test_make_on_existing_filesystem_is_refused(
    attach: Attach, fs_type: str, present: str
) -> None:
    """mkfs.ext4 without a terminal does not ask: it formats over another filesystem and exits with 0."""
    device = attach(300 * MIB)
    run(f"mkfs.{present}", "-q", device.path)
    before = probed(device.path)
    with raised("DeviceNotBlank", match=present):
        await mkfs.make(device.path, fs_type)
    assert probed(device.path) == before


async def test_make_looks_at_the_device_while_it_holds_it(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = attach()
    run("mkfs.ext4", "-q", device.path)
    before = probed(device.path)
    held = []
    probe = signatures.probe

    def noted(path: str) -> signatures.Signature:
        held.append(users.is_held(devices.source(path)))
        return probe(path)

    with monkeypatch.context() as patched:
        patched.setattr(signatures, "probe", noted)
        with raised("DeviceNotBlank", match="ext4"):
            await mkfs.make(device.path, "ext4")
    assert held == [True]
    assert probed(device.path) == before


async def test_make_that_is_refused_leaves_the_device_blank(attach: Attach) -> None:
    device = attach(299 * MIB)
    with raised(
        "DeviceTooSmallForFilesystem", match=f"{299 * MIB} bytes and xfs needs {300 * MIB}"
    ):
        await mkfs.make(device.path, "xfs")
    with raised("UnknownFilesystem", match="ext4, xfs"):
        await mkfs.make(device.path, "ntfs")
    with pytest.raises(commands.CommandFailed, match="nosuchfeature"):
        await mkfs.make(device.path, "ext4", extra_options=("-O", "nosuchfeature"))
    hold = devices.open_exclusive(device.path)
    with pytest.raises(holders.DeviceInUse):
        await mkfs.make(device.path, "ext4")
    os.close(hold)
    assert devices.is_blank(device.path)


@pytest.mark.parametrize("fs_type", mkfs.SUPPORTED)
@pytest.mark.parametrize("tries_held", [1, 1000])
async def test_make_on_device_held_for_moment_is_tried_again(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, fs_type: str, tries_held: int
) -> None:
    """A program that starts for another volume has a copy of our own hold until it executes."""
    device = attach(512 * MIB)
    real, tries = commands.run_command, []

    async def held(argv: Sequence[str], **options: Any) -> commands.Completed:
        if f"mkfs.{fs_type}" not in argv or "-V" in argv:
            return await real(argv, **options)
        tries.append(argv)
        hold = devices.open_exclusive(device.path) if len(tries) <= tries_held else None
        try:
            return await real(argv, **options)
        finally:
            if hold is not None:
                os.close(hold)

    monkeypatch.setattr(commands, "run_command", held)
    if tries_held == 1:
        await mkfs.make(device.path, fs_type)
        assert isinstance(probed(device.path), signatures.Filesystem)
        assert len(tries) == 2
    else:
        with pytest.raises(holders.DeviceInUse):
            await mkfs.make(device.path, fs_type)
        assert isinstance(probed(device.path), signatures.Blank)


_CHECK = {
    "ext4": ("e2fsck", "-f", "-n"),
    "xfs": ("xfs_repair", "-n"),
    "btrfs": ("btrfs", "check", "--readonly"),
}

_WRITES = "write,pwrite64,writev,pwritev,fsync,fdatasync,sync_file_range,ioctl,fallocate"

_MOMENTS = 24

_UUID = "11111111-0000-4000-8000-000000000000"


@pytest.mark.parametrize("fs_type", mkfs.SUPPORTED)
def test_mkfs_killed_at_write_leaves_nothing_complete_or_whole_filesystem(
    attach: Attach, tmp_path: Path, fs_type: str
) -> None:
    device = attach(SIZES[fs_type])
    content = format_decision.Content("v", "formatting", fs_type, _UUID)
    calls = _made(device.path, fs_type, tmp_path / "calls")
    assert len(calls) > _MOMENTS
    on_device = re.findall(r"^(\w+)\((?![12],)", (tmp_path / "calls").read_text(), re.MULTILINE)
    last = max(place for place, name in enumerate(on_device) if "write" in name)
    assert {"fsync", "fdatasync"} & {*on_device[last:]}, "its last write is not synced"
    assert _decision(content, device.path) is format_decision.Action.ADOPT

    decisions = []
    for number in range(0, len(calls), max(1, len(calls) // _MOMENTS)):
        moment = (calls[number], calls[: number + 1].count(calls[number]))
        run("blkdiscard", "--zeroout", device.path)
        _made(device.path, fs_type, tmp_path / "calls", kill_at=moment)
        decisions.append(_decision(content, device.path))
        if decisions[-1] is format_decision.Action.ADOPT:
            subprocess.run([*_CHECK[fs_type], device.path], check=True, capture_output=True)
    assert format_decision.Action.CLEAR_AND_MAKE in decisions


@pytest.mark.parametrize("state", ["new", "formatting"])
def test_device_that_cannot_be_read_is_not_formatted(attach: Attach, state: ContentState) -> None:
    """It fails each read, and would take each write. blkid exits as for a blank device."""
    device = attach()
    run("mkfs.ext4", "-q", device.path)
    fs_type, planned_uuid = ("ext4", _UUID) if state == "formatting" else ("", "")
    content = format_decision.Content("v", state, fs_type, planned_uuid)
    with pytest.raises(format_decision.ContentInDoubt):
        _judged(content, device.path)
    os.truncate(
        device.backing, 0
    )  # the device keeps its size: loop(4) fails what is not in the file
    run("blockdev", "--flushbufs", device.path)
    with pytest.raises(errors.CrustError, match="Input/output error"):
        _judged(content, device.path)


def _made(
    device: str, fs_type: str, calls: Path, *, kill_at: tuple[str, int] | None = None
) -> list[str]:
    """Make the filesystem by the driver's own command; the calls so far. strace counts each system call by itself.

    It is killed at the n-th of one system call, if that is given.
    """
    row = mkfs.TABLE[fs_type]
    uuid = [word.format(_UUID) for word in row.uuid]
    inject = ("-e", "inject={}:signal=SIGKILL:when={}".format(*kill_at)) if kill_at else ()
    program = row.command.index(f"mkfs.{fs_type}")
    strace = ("strace", "-o", str(calls), "-e", f"trace={_WRITES}", *inject)
    argv = [*row.command[:program], *strace, *row.command[program:], *uuid, device]
    subprocess.run(argv, check=kill_at is None, capture_output=True)
    return re.findall(r"^(\w+)\(", calls.read_text(), re.MULTILINE)


def _judged(content: format_decision.Content, device: str) -> format_decision.Action:
    return format_decision.judge(
        content,
        "ext4",
        probed(device),
        superblock_of=lambda fs_type: superblocks.find(device, fs_type),
    )


def _decision(content: format_decision.Content, device: str) -> format_decision.Action:
    return format_decision.judge_interrupted(
        content,
        probed(device),
        superblock_of=lambda fs_type: superblocks.find(device, fs_type),
    )
