"""Paths of a CO lead below a root, through no link."""

import errno
import gc
import os
from pathlib import Path

import pytest

from crust.core import errors
from crust.core.volumes import TargetPath
from crust.host.files import target_paths
from tests.support.raised import raised


def target(path: Path) -> TargetPath:
    return TargetPath.parse(str(path))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "kubelet"
    (path / "pods").mkdir(parents=True)
    return path


def test_make_directory_below_a_root_and_in_it_succeeds_twice(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    for name, roots in (
        ("kubelet/pods/v", [str(root)]),
        ("kubelet/v", ["/nonexistent", f"{root}/"]),
        ("link/pods/w", [str(tmp_path / "link")]),
    ):
        for _ in range(2):
            target_paths.make_directory(target(tmp_path / name), roots)
        assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("name", ["kubelet-other/v", "elsewhere", "kubelet"])
def test_make_directory_outside_the_roots_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    """A prefix test would let kubelet-other pass."""
    (tmp_path / "kubelet-other").mkdir()
    with raised("PathOutsideRoots"):
        target_paths.make_directory(target(tmp_path / name), [str(root)])
    with raised("PathOutsideRoots"):
        target_paths.make_directory(target(root / "v"), [])
    assert os.listdir(tmp_path / "kubelet-other") == []


def test_make_directory_through_a_link_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (root / "pods" / "evil").symlink_to(tmp_path / "victim")
    with pytest.raises(target_paths.SymlinkInPath, match="'evil' is a symbolic link"):
        target_paths.make_directory(target(root / "pods" / "evil" / "v"), [str(root)])
    assert os.listdir(tmp_path / "victim") == []


def test_target_that_is_a_link_is_refused_and_kept(root: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (root / "v").symlink_to(tmp_path / "victim")
    for act in (target_paths.make_directory, target_paths.make_file, target_paths.remove):
        with pytest.raises(target_paths.SymlinkInPath):
            act(target(root / "v"), [str(root)])
    assert (root / "v").is_symlink()
    assert (tmp_path / "victim").is_dir()


def test_make_directory_where_something_else_is_fails(root: Path) -> None:
    (root / "file").touch()
    (root / "v" / "data").mkdir(parents=True)
    for name, error, why in (
        ("none/v", errors.NotFound, "No such file"),
        ("file/v", target_paths.TargetConflict, "'file' is not a directory"),
        ("file", target_paths.TargetConflict, "it is not a directory"),
        ("v", target_paths.TargetConflict, "not empty"),
    ):
        with pytest.raises(error, match=why):
            target_paths.make_directory(target(root / name), [str(root)])
    assert not (root / "none").exists()


def test_make_file_keeps_empty_file_and_refuses_full_one(root: Path) -> None:
    target_paths.make_file(target(root / "v"), [str(root)])
    target_paths.make_file(target(root / "v"), [str(root)])
    (root / "v").write_bytes(b"x")
    with pytest.raises(target_paths.TargetConflict):
        target_paths.make_file(target(root / "v"), [str(root)])
    assert (root / "v").read_bytes() == b"x"
    with pytest.raises(target_paths.TargetConflict):
        target_paths.make_file(target(root / "pods"), [str(root)])


def test_remove_removes_empty_entries_and_ignores_absent_ones(root: Path) -> None:
    target_paths.make_directory(target(root / "d"), [str(root)])
    target_paths.make_file(target(root / "f"), [str(root)])
    for name in ("d", "f", "d", "absent/v"):
        target_paths.remove(target(root / name), [str(root)])
    assert os.listdir(root) == ["pods"]


def test_remove_refuses_content(root: Path) -> None:
    (root / "d" / "data").mkdir(parents=True)
    (root / "f").write_bytes(b"x")
    for name in ("d", "f"):
        with pytest.raises(target_paths.TargetConflict):
            target_paths.remove(target(root / name), [str(root)])
    assert (root / "d" / "data").is_dir()
    assert (root / "f").read_bytes() == b"x"


def test_remove_empty_below_keeps_content_and_what_it_removes_not(root: Path) -> None:
    for name in ("d/empty/er", "d/full"):
        (root / name).mkdir(parents=True)
    (root / "d/full/data").touch()
    (root / "d/link").symlink_to("full")
    target_paths.remove_empty_below(target(root / "d"), [str(root)])
    assert sorted(os.listdir(root / "d")) == ["full", "link"]
    for absent in ("d/full/data", "d/link", "absent"):
        target_paths.remove_empty_below(target(root / absent), [str(root)])
    assert (root / "d/full/data").exists()


def test_remove_empty_below_passes_no_failure_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the caller would call a directory full that the disk does not let it remove."""

    def fail(path: str, **_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    (root / "d/empty").mkdir(parents=True)
    monkeypatch.setattr(os, "rmdir", fail)
    with pytest.raises(errors.RuntimeFailed, match="EIO"):
        target_paths.remove_empty_below(target(root / "d"), [str(root)])


def test_no_descriptor_is_left_open(root: Path) -> None:
    (root / "link").symlink_to("pods")
    gc.collect()  # what the tests before have left
    before = len(os.listdir("/proc/self/fd"))
    for name in ("pods/v", "link/v", "none/v"):
        for act in (target_paths.make_directory, target_paths.remove):
            try:
                act(target(root / name), [str(root)])
            except errors.CrustError:
                continue
    assert len(os.listdir("/proc/self/fd")) == before
