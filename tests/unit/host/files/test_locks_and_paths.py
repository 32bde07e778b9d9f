"""Locks have one owner, whose death is known; paths of a CO lead below a root, through no link."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crust.core import errors
from crust.core.volumes import TargetPath
from crust.host.files import durable, locks, target_paths
from crust.host.files.durable import DirectoryReplaced, HeldDirectory
from tests.support.raised import raised


def test_acquire_of_a_held_lock_names_the_holders_pid(tmp_path: Path) -> None:
    held = pytest.raises(locks.LockHeld, match=f": process {os.getpid()} holds it")
    with locks.ProcessLock.acquire(tmp_path / "lock"), held:
        locks.ProcessLock.acquire(tmp_path / "lock")
    lock = locks.ProcessLock.acquire(tmp_path / "lock")
    lock.close()
    lock.close()
    assert (tmp_path / "lock").exists()


def test_acquire_of_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("elsewhere")
    with pytest.raises(errors.Refused):
        locks.ProcessLock.acquire(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()


def test_lock_is_released_when_its_process_dies(tmp_path: Path) -> None:
    code = (
        "import sys; from crust.host.files import locks as ownership; "
        "lock = ownership.ProcessLock.acquire(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(locks.LockHeld, match=f": process {owner.pid} holds it"):
            locks.ProcessLock.acquire(tmp_path / "lock")
        owner.kill()
        owner.wait()
    locks.ProcessLock.acquire(tmp_path / "lock").close()


def test_lock_on_inherited_descriptor_lives_as_long_as_child(tmp_path: Path) -> None:
    """A claim's lock is handed to the hypervisor: it must outlive whoever took it, and no longer than the heir."""
    path = tmp_path / "claim"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    assert locks.try_lock(fd)
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=(fd,),
    ) as heir:
        os.close(fd)
        other = os.open(path, os.O_RDWR)
        try:
            assert not locks.try_lock(other)
            heir.kill()
            heir.wait()
            assert locks.try_lock(other)
        finally:
            os.close(other)


def held(path: Path) -> HeldDirectory:
    path.mkdir()
    made = HeldDirectory(str(path))
    made.hold()
    return made


def test_a_held_path_leads_to_the_directory_that_was_opened(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    durable.make_directory(directory / "c", 0o700)
    durable.write_file(directory / "c" / "file", b"1")
    assert (tmp_path / "b" / "c" / "file").read_bytes() == b"1"
    assert not (tmp_path / "a").exists()


def test_errors_name_the_path_that_people_know(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    with pytest.raises(errors.NotFound) as caught:
        durable.write_file(directory / "absent" / "file", b"")
    assert f"{tmp_path}/a/absent/file" in str(caught.value)
    assert "/proc/" not in str(caught.value)
    (tmp_path / "a" / "link").symlink_to("x")
    with pytest.raises(errors.CrustError) as linked:
        durable.read(directory / "link", limit_bytes=1)
    assert "/proc/" not in str(linked.value)


def test_path_below_a_released_directory_is_refused(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    path = f"/proc/self/fd/{directory.descriptor()}/file"
    directory.let_go()
    with raised("DirectoryNotHeld"):
        durable.write_file(directory / "file", b"")
    # a thread that looked the path up before is led nowhere either, whatever was opened since
    with (tmp_path / "other").open("w"), pytest.raises(NotADirectoryError):
        Path(path).write_bytes(b"")
    directory.hold()
    assert f"/proc/self/fd/{directory.descriptor()}/file" == path
    durable.write_file(directory / "file", b"")


def with_folder(tmp_path: Path) -> HeldDirectory:
    directory = held(tmp_path / "a")
    durable.make_directory(directory / "folder", 0o700)
    directory.hold_folder("folder")
    return directory


def test_held_folder_is_reached_after_another_one_took_its_name(tmp_path: Path) -> None:
    directory, folder = with_folder(tmp_path), tmp_path / "a" / "folder"
    directory.check_in_place()
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    durable.make_directory(directory / "folder", 0o700)
    durable.write_file(directory / "folder" / "file", b"1")
    durable.make_directory(directory / "folder" / "deep", 0o700)
    assert {path.name for path in (tmp_path / "moved").iterdir()} == {"file", "deep"}
    assert not any(folder.iterdir())
    with pytest.raises(DirectoryReplaced, match=f"{folder} is not the directory"):
        directory.check_in_place()
    folder.rmdir()
    with pytest.raises(DirectoryReplaced, match=f"{folder} is not the directory"):
        directory.check_in_place()


def test_folder_is_released_with_its_directory_and_held_again(tmp_path: Path) -> None:
    directory, folder = with_folder(tmp_path), tmp_path / "a" / "folder"
    path = (directory / "folder" / "file").__fspath__()
    directory.let_go()
    with raised("DirectoryNotHeld"):
        durable.write_file(directory / "folder" / "file", b"")
    with pytest.raises(NotADirectoryError):
        Path(path).write_bytes(b"")
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    directory.hold()
    directory.hold_folder("folder")
    directory.check_in_place()
    durable.write_file(directory / "folder" / "file", b"")
    assert (folder / "file").exists()


def test_a_link_is_not_held_as_a_folder(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    (tmp_path / "a" / "folder").symlink_to(tmp_path)
    with pytest.raises(errors.CrustError):
        directory.hold_folder("folder")
    assert (directory / "folder").__fspath__() == f"/proc/self/fd/{directory.descriptor()}/folder"


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
    with pytest.raises(target_paths.PathOutsideRoots):
        target_paths.make_directory(target(tmp_path / name), [str(root)])
    with pytest.raises(target_paths.PathOutsideRoots):
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
