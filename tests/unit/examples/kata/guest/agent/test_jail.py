"""The subPaths of a volume."""

import os
import stat
from pathlib import Path

import pytest

from examples.kata.guest.agent import jail, protocol


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume's tree beside something that is none of its business."""
    (tmp_path / "outside").mkdir()
    root = tmp_path / "volume"
    (root / "a" / "b").mkdir(parents=True)
    (root / "inside").symlink_to("a/b")
    (root / "absolute").symlink_to("/etc")
    (root / "up").symlink_to("../outside")
    (root / "a" / "chain").symlink_to("../up")
    (root / "file").write_text("x")
    os.mkfifo(root / "fifo")
    return root


def _resolve(volume: Path, sub_path: str, *, create: bool) -> str:
    root = os.open(volume, os.O_RDONLY | os.O_DIRECTORY)
    try:
        descriptor = jail.resolve_sub_path(root, sub_path, create=create)
    finally:
        os.close(root)
    try:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), volume)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("sub_path", "expected"),
    [("a/b", "a/b"), ("inside", "a/b"), ("a//./b/", "a/b"), ("file", "file"), ("", ".")],
)
def test_a_sub_path_inside_the_volume_is_found(volume: Path, sub_path: str, expected: str) -> None:
    assert _resolve(volume, sub_path, create=False) == expected


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize(
    "sub_path",
    ["absolute", "absolute/passwd", "up", "up/new", "a/chain", "../x", "/etc", "a/../b", "fifo"],
)
def test_sub_path_that_leads_out_is_refused_and_creates_nothing(
    volume: Path, sub_path: str, *, create: bool
) -> None:
    before = sorted(volume.parent.rglob("*"))
    with pytest.raises(protocol.Fault, match="refused"):
        _resolve(volume, sub_path, create=create)
    assert sorted(volume.parent.rglob("*")) == before


def test_missing_directories_of_sub_path_are_made_with_roots_mode(volume: Path) -> None:
    volume.chmod(0o770)
    assert _resolve(volume, "inside/x/y", create=True) == "a/b/x/y"
    assert stat.S_IMODE((volume / "a/b/x").stat().st_mode) == 0o770
    with pytest.raises(protocol.Fault, match="not_found"):
        _resolve(volume, "other/x", create=False)
