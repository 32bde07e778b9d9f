"""The command line of mkfs, without a device."""

from collections.abc import Sequence
from typing import Any

import pytest

from crust.host.filesystems import mkfs
from crust.host.process import commands
from tests.support.raised import raised


@pytest.mark.parametrize(
    ("fs_type", "version", "absent"),
    [
        ("xfs", "mkfs.xfs version 5.13.0", ()),
        ("xfs", "mkfs.xfs version 6.1.0", ("nrext64=0",)),
        ("xfs", "mkfs.xfs version 6.18.0", ("nrext64=0", "exchange=0", "parent=0")),
        ("btrfs", "mkfs.btrfs, part of btrfs-progs v6.2", ()),
        ("btrfs", "mkfs.btrfs, part of btrfs-progs v7.0", ("^block-group-tree",)),
    ],
)
async def test_make_by_newer_mkfs_switches_off_the_later_features(
    monkeypatch: pytest.MonkeyPatch,
    fs_type: str,
    version: str,
    absent: Sequence[str],
) -> None:
    made: list[str] = []

    async def answer(argv: Sequence[str], **_: Any) -> commands.Completed:
        made[:] = argv
        return commands.Completed(0, version.encode(), "")

    monkeypatch.setattr(commands, "run_command", answer)
    await mkfs.make("/dev/none", fs_type, looks=False)
    later = [words for _, words in mkfs.TABLE[fs_type].later]
    known = {word for words in later for word in words if not word.startswith("-")}
    assert {word for word in made if word in known} == set(absent)


async def test_make_by_mkfs_of_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[Sequence[str]] = []

    async def answer(argv: Sequence[str], **_: Any) -> commands.Completed:
        run.append(argv)
        return commands.Completed(0, b"mkfs.xfs of a vendor", "")

    monkeypatch.setattr(commands, "run_command", answer)
    with raised("MkfsVersionUnknown", match="of a vendor"):
        await mkfs.make("/dev/none", "xfs", looks=False)
    assert run == [["mkfs.xfs", "-V"]]


@pytest.mark.parametrize(
    ("fs_type", "oldest", "older"),
    [("ext4", "3.18", "3.17.9"), ("xfs", "5.10.0-rc1", "5.9.16"), ("btrfs", "4.9", "4.8-custom")],
)
def test_kernel_that_cannot_mount_what_is_made_is_refused(
    fs_type: str, oldest: str, older: str
) -> None:
    for kernel in ("", oldest, "6.12.1-generic"):
        mkfs.check_kernel(fs_type, kernel)
    with raised("GuestKernelTooOld", match=older):
        mkfs.check_kernel(fs_type, older)
