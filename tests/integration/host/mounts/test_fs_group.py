"""The group of a tree: what a kubelet would do, without leaving the volume."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from crust import volumes
from crust.host.mounts import fs_group, mount_api

pytestmark = pytest.mark.root

GID = 4321
ALWAYS = volumes.GroupChange(GID, volumes.GroupPolicy.ALWAYS)
ON_MISMATCH = volumes.GroupChange(GID, volumes.GroupPolicy.ON_ROOT_MISMATCH)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_apply_makes_files_group_writable_and_directories_setgid(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True, mode=0o700)
    (tmp_path / "a" / "file").touch(mode=0o400)
    (tmp_path / "a" / "file").chmod(0o4511)
    os.mkfifo(tmp_path / "a" / "pipe")
    fs_group.apply(str(tmp_path), ALWAYS)
    for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        assert path.stat().st_gid == GID
        assert mode(path) & 0o2770 == 0o2770
    assert (tmp_path / "a" / "file").stat().st_gid == GID
    assert mode(tmp_path / "a" / "file") & 0o660 == 0o660
    assert (tmp_path / "a" / "pipe").stat().st_gid == GID


def test_apply_on_root_mismatch_skips_a_matching_root(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = (tmp_path / "file").stat().st_gid
    os.chown(tmp_path, -1, GID)
    tmp_path.chmod(0o2770)
    fs_group.apply(str(tmp_path), ON_MISMATCH)
    assert (tmp_path / "file").stat().st_gid == before
    tmp_path.chmod(0o770)
    fs_group.apply(str(tmp_path), ON_MISMATCH)
    assert (tmp_path / "file").stat().st_gid == GID


def test_apply_changes_links_themselves_and_skips_other_filesystems(tmp_path: Path) -> None:
    volume, outside = tmp_path / "volume", tmp_path / "outside"
    volume.mkdir()
    outside.mkdir()
    (outside / "file").touch(mode=0o600)
    untouched = (outside / "file").stat()
    (volume / "to-directory").symlink_to(outside)
    (volume / "to-file").symlink_to(outside / "file")
    (volume / "other").mkdir()
    mount_api.mount_guard(str(volume / "other"))
    fs_group.apply(str(volume), ALWAYS)
    assert (volume / "to-directory").lstat().st_gid == GID
    assert outside.stat().st_gid != GID
    now = (outside / "file").stat()
    assert (now.st_gid, now.st_mode) == (untouched.st_gid, untouched.st_mode)
    assert (volume / "other").stat().st_gid != GID
    mount_api.unmount(str(volume / "other"))


def test_apply_leaves_what_replaced_a_file_since_it_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer in the volume puts a pipe, or a device's node, where a file was."""
    swapped = tmp_path / "swapped"
    swapped.touch()

    def swap(name: str, _directory: int) -> None:
        if name == "swapped":
            swapped.unlink()
            os.mkfifo(swapped, 0o600)

    before_open(monkeypatch, swap)
    fs_group.apply(str(tmp_path), ALWAYS)
    assert swapped.is_fifo()
    assert (swapped.stat().st_gid, mode(swapped)) == (os.getgid(), 0o600)


def test_apply_leaves_a_filesystem_that_was_mounted_over_a_directory_since_it_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    covered = tmp_path / "covered"
    covered.mkdir()

    def cover(name: str, _directory: int) -> None:
        if name == "covered":
            mount_api.mount_guard(str(covered))

    before_open(monkeypatch, cover)
    fs_group.apply(str(tmp_path), ALWAYS)
    try:
        assert covered.is_mount()
        assert covered.stat().st_gid != GID
    finally:
        mount_api.unmount(str(covered))


def before_open(monkeypatch: pytest.MonkeyPatch, act: Callable[[str, int], None]) -> None:
    """Run `act(name, directory)` before each open of a name in a directory."""
    real = os.open

    def opened(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:
            act(path, dir_fd)
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", opened)


def test_apply_walks_a_tree_deeper_than_the_python_stack(tmp_path: Path) -> None:
    depth = 1500
    parent = os.open(tmp_path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=parent)
        child = os.open("d", os.O_RDONLY, dir_fd=parent)
        os.close(parent)
        parent = child
    fs_group.apply(str(tmp_path), ALWAYS)
    assert os.fstat(parent).st_gid == GID
    for _ in range(depth):  # by hand: what removes old test directories recurses
        above = os.open("..", os.O_RDONLY, dir_fd=parent)
        os.close(parent)
        os.rmdir("d", dir_fd=above)
        parent = above
    os.close(parent)
