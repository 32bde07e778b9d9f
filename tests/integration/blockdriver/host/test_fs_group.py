"""The group of a tree, without leaving its volume."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from crust.blockdriver.host import fs_group
from crust.core import volumes
from crust.host.mounts import mount_api
from tests.support.raised import raised

pytestmark = pytest.mark.root

GID = 4321
ALWAYS = volumes.GroupChange(GID, volumes.GroupPolicy.ALWAYS)
ON_MISMATCH = volumes.GroupChange(GID, volumes.GroupPolicy.ON_ROOT_MISMATCH)


def apply(root: str, change: volumes.GroupChange) -> None:
    """Walk to the end."""
    assert all(fs_group.steps(root, change))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_apply_makes_files_group_writable_and_directories_setgid(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True, mode=0o700)
    (tmp_path / "a" / "file").touch(mode=0o400)
    (tmp_path / "a" / "file").chmod(0o4511)
    os.mkfifo(tmp_path / "a" / "pipe")
    apply(str(tmp_path), ALWAYS)
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
    apply(str(tmp_path), ON_MISMATCH)
    assert (tmp_path / "file").stat().st_gid == before
    tmp_path.chmod(0o770)
    apply(str(tmp_path), ON_MISMATCH)
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
    apply(str(volume), ALWAYS)
    assert (volume / "to-directory").lstat().st_gid == GID
    assert outside.stat().st_gid != GID
    now = (outside / "file").stat()
    assert (now.st_gid, now.st_mode) == (untouched.st_gid, untouched.st_mode)
    assert (volume / "other").stat().st_gid != GID
    mount_api.unmount(str(volume / "other"))


def test_apply_leaves_file_or_directory_replaced_since_the_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer in the volume puts a pipe, or a device's node, where a file was."""
    swapped, covered = tmp_path / "swapped", tmp_path / "covered"
    swapped.touch()
    covered.mkdir()

    def act(name: str, _directory: int) -> None:
        if name == "swapped":
            swapped.unlink()
            os.mkfifo(swapped, 0o600)
        if name == "covered":
            mount_api.mount_guard(str(covered))

    before_open(monkeypatch, act)
    apply(str(tmp_path), ALWAYS)
    try:
        assert swapped.is_fifo()
        assert (swapped.stat().st_gid, mode(swapped)) == (os.getgid(), 0o600)
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


WITH_FEW_DESCRIPTORS = """
import resource, sys
from crust.core import volumes
from crust.blockdriver.host import fs_group
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
change = volumes.GroupChange(int(sys.argv[2]), volumes.GroupPolicy.ALWAYS)
assert all(fs_group.steps(sys.argv[1], change))
"""


@contextmanager
def deep_tree(top: Path, depth: int) -> Iterator[list[int]]:
    """A chain of directories "d"; yields a descriptor of each, the top's first."""
    chain = [os.open(top, os.O_RDONLY)]
    for _ in range(depth):
        os.mkdir("d", dir_fd=chain[-1])
        chain.append(os.open("d", os.O_RDONLY, dir_fd=chain[-1]))
    try:
        yield chain
    finally:
        for fd in reversed(chain):  # by hand: what removes old test directories recurses
            with suppress(FileNotFoundError):
                os.rmdir("d", dir_fd=fd)
            os.close(fd)


def test_apply_walks_a_tree_deeper_than_files_and_stack(tmp_path: Path) -> None:
    with deep_tree(tmp_path, 1500) as chain:
        side = os.open("side", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=chain[700])
        argv = [sys.executable, "-c", WITH_FEW_DESCRIPTORS, str(tmp_path), str(GID)]
        subprocess.run(argv, check=True)
        assert {os.fstat(fd).st_gid for fd in (*chain, side)} == {GID}
        os.close(side)
        os.unlink("side", dir_fd=chain[700])


def test_apply_does_not_follow_directory_moved_out_during_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor was closed, and ".." of what is below it leads out of the volume now."""
    volume, outside = tmp_path / "volume", tmp_path / "outside"
    volume.mkdir()
    outside.mkdir()
    (outside / "file").touch(mode=0o600)
    with deep_tree(volume, 200) as chain:
        deepest = os.fstat(chain[-2]).st_ino

        def move(_name: str, directory: int) -> None:
            if os.fstat(directory).st_ino == deepest and not (outside / "moved").exists():
                (volume / "d" / "d").rename(outside / "moved")

        before_open(monkeypatch, move)
        with raised("TreeMoved"):
            apply(str(volume), ALWAYS)
        assert [os.fstat(chain[depth]).st_gid == GID for depth in (0, 1, 2)] == [False, False, True]
        assert {path.stat().st_gid for path in (outside, outside / "file")} == {os.getgid()}
        (outside / "moved").rename(volume / "d" / "d")
