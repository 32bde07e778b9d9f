"""A mkfs that is newer than the kernel: features are left out until the kernel mounts the result."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

from crust.host.block import devices, signatures
from crust.host.filesystems import mkfs
from crust.host.filesystems.mkfs_compatibility import MkfsCompatibility
from crust.host.mounts import mount_api
from crust.host.process import commands
from tests.integration.host.conftest import MIB, Attach, run

pytestmark = pytest.mark.root

SIZES = {"ext4": 64 * MIB, "xfs": 300 * MIB, "btrfs": 128 * MIB}
_OF_THE_FUTURE = {
    "ext4": ("debugfs", "-w", "-R", "feature FEATURE_I31"),
    "xfs": ("xfs_db", "-x", "-c", "sb 0", "-c", "write -d features_incompat 0x40000003"),
}


@pytest.mark.parametrize("fs_type", list(SIZES))
async def test_make_of_a_mountable_filesystem_runs_mkfs_once(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, fs_type: str
) -> None:
    asked = record(monkeypatch)
    compatibility = MkfsCompatibility()
    for name in ("one", "two"):
        device = attach(SIZES[fs_type], name)
        await compatibility.make(device.path, fs_type)
        found = signatures.probe(device.path)
        assert isinstance(found, signatures.Filesystem)
        assert found.type == fs_type
        os.close(devices.open_exclusive(device.path))
    assert asked == [(), ()]


@pytest.mark.parametrize("fs_type", list(_OF_THE_FUTURE))
async def test_make_leaves_out_features_unknown_to_the_kernel_and_remembers(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, mountpoint: str, fs_type: str
) -> None:
    asked = record(monkeypatch, future=_OF_THE_FUTURE[fs_type])
    compatibility = MkfsCompatibility()
    for name in ("one", "two"):
        device = attach(SIZES[fs_type], name)
        await compatibility.make(device.path, fs_type)
        mount_api.mount_device(device.path, mountpoint, fs_type)
        mount_api.unmount(mountpoint)
    assert asked[0] == ()
    assert () not in asked[1:]
    assert asked[-1] == asked[-2]


async def test_make_with_invalid_options_reports_mkfs_message(attach: Attach) -> None:
    with pytest.raises(commands.CommandFailed, match="bogus"):
        await MkfsCompatibility().make(attach().path, "ext4", extra_options=("-O", "bogus"))


async def test_make_on_a_held_device_does_not_clear_it(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = attach()
    record(monkeypatch, future=_OF_THE_FUTURE["ext4"])
    real = mkfs.make
    held: list[int] = []

    async def make(path: str, fs_type: str, **how: Any) -> None:
        await real(path, fs_type, **how)
        held.append(os.open(path, os.O_RDONLY | os.O_EXCL))

    monkeypatch.setattr(mkfs, "make", make)
    try:
        await MkfsCompatibility().make(device.path, "ext4")
    finally:
        os.close(held[0])
    assert len(held) == 1
    assert isinstance(signatures.probe(device.path), signatures.Filesystem)


def record(monkeypatch: pytest.MonkeyPatch, *, future: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """The options that mkfs gets; without any it makes, with `future`, what no kernel knows."""
    asked: list[tuple[str, ...]] = []
    real = mkfs.make

    async def make(
        path: str, fs_type: str, *, extra_options: Sequence[str] = (), **how: Any
    ) -> None:
        asked.append(tuple(extra_options))
        await real(path, fs_type, extra_options=extra_options, **how)
        if future and not extra_options:
            run(*future, path)

    monkeypatch.setattr(mkfs, "make", make)
    return asked
