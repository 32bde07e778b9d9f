"""The walk for fsGroup over what a tenant wrote: a bounded number of visits, a bounded memory, damage by its name."""

import os
import tracemalloc
from pathlib import Path

import pytest

from crust.blockdriver.host import fs_group
from crust.core import errors, volumes
from crust.host.filesystems import mkfs
from crust.host.mounts import mount_api
from tests.integration.host.conftest import MIB, Attach
from tests.support.drivers import hostile_ext4
from tests.support.raised import raised

pytestmark = pytest.mark.root

GID = 4321
ALWAYS = volumes.GroupChange(GID, volumes.GroupPolicy.ALWAYS)


@pytest.fixture(autouse=True)
def _step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each visit be a step, so that a test can count them."""
    monkeypatch.setattr(fs_group, "STEP", 1)


def _visits(root: str, at_most: int) -> int:
    """Walk to the end, or further than `at_most`."""
    number = 0
    for number, _ in enumerate(fs_group.steps(root, ALWAYS), 1):
        assert number <= at_most
    return number


async def _device(attach: Attach) -> str:
    device = attach(16 * MIB)
    await mkfs.make(device.path, "ext4")
    return device.path


async def test_directories_with_many_names_are_visited_once_and_named(
    attach: Attach, mountpoint: str
) -> None:
    """20 ** 7 paths. The first walk changes the directories, so a second one finds that no writer did."""
    device = await _device(attach)
    hostile_ext4.link_directories(device, levels=7, names=20)
    mount_api.mount_device(device, mountpoint, "ext4")
    with raised("DirectoryDamaged", errors.Corrupt, match="more than one name leads to it"):
        _visits(mountpoint, at_most=2 * 8 * 21)
    assert Path(mountpoint).stat().st_gid != GID


async def test_directory_larger_than_its_filesystem_is_named_unread(
    attach: Attach, mountpoint: str
) -> None:
    device = await _device(attach)
    hostile_ext4.repeat_block(device, blocks=5000)
    mount_api.mount_device(device, mountpoint, "ext4")
    with raised("DirectoryDamaged", errors.Corrupt, match="it has 20480000 bytes"):
        _visits(mountpoint, at_most=10)
    assert Path(mountpoint).stat().st_gid != GID


async def test_directory_that_contains_a_parent_is_named(attach: Attach, mountpoint: str) -> None:
    device = await _device(attach)
    hostile_ext4.loop_directory(device)
    mount_api.mount_device(device, mountpoint, "ext4")
    with raised("DirectoryDamaged", errors.Corrupt, match="leads to itself or a parent"):
        _visits(mountpoint, at_most=10)


def test_names_of_a_large_directory_are_not_held(tmp_path: Path) -> None:
    """10,000 names of 200 bytes are 2.5 MB and more."""
    for number in range(10_000):
        os.mknod(tmp_path / f"{number:0200d}")
    tracemalloc.start()
    try:
        assert _visits(str(tmp_path), at_most=10_001) == 10_001
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


def test_directories_moved_during_the_walk_are_no_damage(tmp_path: Path) -> None:
    """A writer moves each directory to a place that the walk reads later, where it meets it again."""
    for number in range(30):
        (tmp_path / f"{number}" / "below").mkdir(parents=True)
    (tmp_path / "late").mkdir()
    for _ in fs_group.steps(str(tmp_path), ALWAYS):
        for path in tmp_path.iterdir():
            if path.name != "late" and path.stat().st_gid == GID:
                path.rename(tmp_path / "late" / path.name)
    assert {path.stat().st_gid for path in (tmp_path, *tmp_path.rglob("*"))} == {GID}


def test_closed_directory_goes_on_after_the_name_that_led_down(tmp_path: Path) -> None:
    """Each of three names leads deeper than the walk holds directories open."""
    for name in ("a", "b", "c"):
        (tmp_path / name / "/".join("d" * fs_group._HELD)).mkdir(parents=True)
        (tmp_path / f"{name}-file").touch()
    paths = [tmp_path, *tmp_path.rglob("*")]
    again = 6 * 3  # for each name that led down: the names until it
    assert _visits(str(tmp_path), at_most=2 * len(paths) + again) >= 2 * len(paths) - 3
    assert {path.stat().st_gid for path in paths} == {GID}


def test_walk_that_is_ended_leaves_the_root_and_no_descriptor(tmp_path: Path) -> None:
    """So the next one begins again, also where the root decides."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    before = os.listdir("/proc/self/fd")
    walk = fs_group.steps(str(tmp_path), ALWAYS)
    assert next(walk)
    walk.close()
    assert os.listdir("/proc/self/fd") == before
    assert tmp_path.stat().st_gid != GID
    on_mismatch = volumes.GroupChange(GID, volumes.GroupPolicy.ON_ROOT_MISMATCH)
    assert all(fs_group.steps(str(tmp_path), on_mismatch))
    assert (tmp_path / "a" / "b").stat().st_gid == GID


def test_walk_that_forgets_directories_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_group, "_PIECE", 8)
    monkeypatch.setattr(fs_group, "_PIECES", 1)
    for number in range(50):
        (tmp_path / f"{number}" / "below").mkdir(parents=True)
    assert _visits(str(tmp_path), at_most=202) == 201
    assert {path.stat().st_gid for path in (tmp_path, *tmp_path.rglob("*"))} == {GID}
