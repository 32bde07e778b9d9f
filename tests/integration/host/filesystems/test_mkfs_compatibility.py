"""A mkfs that is newer than the kernel: features are left out until the kernel mounts the result."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

from crust.host.block import devices, loop, loopctl, signatures
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
async def test_a_volume_is_formatted_once_and_tried_elsewhere_before(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, fs_type: str
) -> None:
    made = record(monkeypatch)
    compatibility = MkfsCompatibility()
    volumes = [attach(SIZES[fs_type], name).path for name in ("one", "two")]
    for path in volumes:
        await compatibility.make(path, fs_type)
        found = signatures.probe(path)
        assert isinstance(found, signatures.Filesystem)
        assert found.type == fs_type
        os.close(devices.open_exclusive(path))
    assert [path for path, _ in made][1:] == volumes
    assert made[0][0] not in volumes


@pytest.mark.parametrize("fs_type", list(_OF_THE_FUTURE))
async def test_features_unknown_to_the_kernel_are_left_out_and_the_volume_is_formatted_once(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, mountpoint: str, fs_type: str
) -> None:
    made = record(monkeypatch, future=_OF_THE_FUTURE[fs_type])
    compatibility = MkfsCompatibility()
    volumes = [attach(SIZES[fs_type], name).path for name in ("one", "two")]
    for path in volumes:
        await compatibility.make(path, fs_type)
        mount_api.mount_device(path, mountpoint, fs_type)
        mount_api.unmount(mountpoint)
    of_volumes = [(path, options) for path, options in made if path in volumes]
    assert [path for path, _ in of_volumes] == volumes
    assert made[0][1] == ()
    assert all(options for _, options in of_volumes)


async def test_scratch_device_is_detached_at_its_end() -> None:
    with loop.scratch(64 * MIB) as path:
        assert devices.size_bytes(path) == 64 * MIB
        assert devices.is_blank(path)
        number = int(path.removeprefix("/dev/loop"))
        assert loopctl.is_bound(number)
    with loopctl.Changes() as changes:
        assert changes.wait_until(lambda: not loopctl.is_bound(number))


async def test_make_with_invalid_options_reports_mkfs_message(attach: Attach) -> None:
    with pytest.raises(commands.CommandFailed, match="bogus"):
        await MkfsCompatibility().make(attach().path, "ext4", extra_options=("-O", "bogus"))


def record(
    monkeypatch: pytest.MonkeyPatch, *, future: Sequence[str] = ()
) -> list[tuple[str, tuple[str, ...]]]:
    """The devices and options that mkfs gets; without options it makes, with `future`, what no kernel knows."""
    made: list[tuple[str, tuple[str, ...]]] = []
    real = mkfs.make

    async def make(
        path: str, fs_type: str, *, extra_options: Sequence[str] = (), **how: Any
    ) -> None:
        made.append((path, tuple(extra_options)))
        await real(path, fs_type, extra_options=extra_options, **how)
        if future and not extra_options:
            run(*future, path)

    monkeypatch.setattr(mkfs, "make", make)
    return made
