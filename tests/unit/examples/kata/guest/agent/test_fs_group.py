"""fsGroup on a real tree."""

import itertools
import os
import stat
from pathlib import Path

import pytest

from examples.kata.guest.agent import fs_group, protocol


@pytest.mark.parametrize(
    ("mode", "read_only", "expected"),
    [
        (stat.S_IFREG | 0o600, False, 0o660),
        (stat.S_IFREG | 0o600, True, 0o640),
        (stat.S_IFREG | 0o000, True, 0o440),
        (stat.S_IFREG | 0o4755, False, 0o4775),
        (stat.S_IFDIR | 0o700, False, 0o2770),
        (stat.S_IFDIR | 0o700, True, 0o2750),
        (stat.S_IFDIR | 0o1777, False, 0o3777),
        (stat.S_IFIFO | 0o600, False, 0o660),
    ],
)
def test_fs_group_modes_match_the_kubelet(mode: int, read_only: bool, expected: int) -> None:  # noqa: FBT001
    assert fs_group.wanted_mode(mode, read_only=read_only) == expected


def _apply(path: str, gid: int, policy: str, *, read_only: bool) -> int:
    """The number of entries that a whole walk visits."""
    return sum(1 for _ in fs_group.walk(path, gid, policy, read_only=read_only))


def test_fs_group_does_not_follow_symlinks(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "secret").write_text("x")
    (outside / "secret").chmod(0o600)
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True, mode=0o700)
    (tree / "sub" / "file").write_text("x")
    (tree / "sub" / "file").chmod(0o600)
    (tree / "file-link").symlink_to(outside / "secret")
    (tree / "dir-link").symlink_to(outside)
    (tree / "self").symlink_to("self")
    os.mkfifo(tree / "pipe", 0o600)
    visited = _apply(str(tree), os.getgid(), fs_group.ALWAYS, read_only=False)
    assert visited == 7
    modes = {p.name: stat.S_IMODE(p.lstat().st_mode) for p in (tree, *tree.rglob("*"))}
    assert (modes["tree"] & 0o2770, modes["sub"] & 0o2770) == (0o2770, 0o2770)
    assert (modes["file"], modes["pipe"]) == (0o660, 0o660)
    assert stat.S_IMODE((outside / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(outside.stat().st_mode) == 0o700


def test_on_root_mismatch_skips_a_tree_with_matching_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "file").chmod(0o600)
    group, policy = os.getgid(), fs_group.ON_ROOT_MISMATCH
    assert _apply(str(tmp_path), group, policy, read_only=False) == 2
    (tmp_path / "file").chmod(0o600)
    assert _apply(str(tmp_path), group, policy, read_only=False) == 0
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    tmp_path.chmod(0o770)
    assert _apply(str(tmp_path), group, policy, read_only=False) == 2


def test_fs_group_refuses_too_deep_tree_and_leaks_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_group, "_MAX_DEPTH", 20)
    tmp_path.joinpath(*["d"] * 30).mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(protocol.Fault, match="refused"):
        _apply(str(tmp_path), os.getgid(), fs_group.ALWAYS, read_only=False)
    assert len(os.listdir("/proc/self/fd")) == before


def test_ended_fs_group_walk_leaves_root_and_no_descriptor(tmp_path: Path) -> None:
    """OnRootMismatch must not treat it as a finished one."""
    for name in range(5):
        (tmp_path / str(name)).mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    before = len(os.listdir("/proc/self/fd"))
    walk = fs_group.walk(str(tmp_path), os.getgid(), fs_group.ON_ROOT_MISMATCH, read_only=False)
    assert len(list(itertools.islice(walk, 3))) == 3
    walk.close()  # type: ignore[attr-defined]  # it is a generator
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    assert len(os.listdir("/proc/self/fd")) == before
    assert _apply(str(tmp_path), os.getgid(), fs_group.ON_ROOT_MISMATCH, read_only=False) == 6
