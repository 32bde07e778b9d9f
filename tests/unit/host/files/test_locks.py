"""Locks have one owner, whose death is known; a held directory leads to one place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.files import durable, locks
from crust.host.files.held_directory import DirectoryReplaced, HeldDirectory
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


def test_lock_on_an_inherited_descriptor_lives_as_long_as_the_child(tmp_path: Path) -> None:
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
    durable.publish(directory / "c" / "file", b"1")
    assert (tmp_path / "b" / "c" / "file").read_bytes() == b"1"
    assert not (tmp_path / "a").exists()


def test_errors_name_the_path_that_people_know(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    with pytest.raises(errors.NotFound) as caught:
        durable.publish(directory / "absent" / "file", b"")
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
        durable.publish(directory / "file", b"")
    # a thread that looked the path up before is led nowhere either, whatever was opened since
    with (tmp_path / "other").open("w"), pytest.raises(NotADirectoryError):
        Path(path).write_bytes(b"")
    directory.hold()
    assert f"/proc/self/fd/{directory.descriptor()}/file" == path
    durable.publish(directory / "file", b"")


def with_folder(tmp_path: Path) -> HeldDirectory:
    directory = held(tmp_path / "a")
    durable.make_directory(directory / "folder", 0o700)
    directory.hold_folder("folder")
    return directory


def test_a_held_folder_is_reached_after_another_one_took_its_name(tmp_path: Path) -> None:
    directory, folder = with_folder(tmp_path), tmp_path / "a" / "folder"
    directory.check_in_place()
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    durable.make_directory(directory / "folder", 0o700)
    durable.publish(directory / "folder" / "file", b"1")
    durable.make_directory(directory / "folder" / "deep", 0o700)
    assert {each.name for each in (tmp_path / "moved").iterdir()} == {"file", "deep"}
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
        durable.publish(directory / "folder" / "file", b"")
    with pytest.raises(NotADirectoryError):
        Path(path).write_bytes(b"")
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    directory.hold()
    directory.hold_folder("folder")
    directory.check_in_place()
    durable.publish(directory / "folder" / "file", b"")
    assert (folder / "file").exists()


def test_a_link_is_not_held_as_a_folder(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    (tmp_path / "a" / "folder").symlink_to(tmp_path)
    with pytest.raises(errors.CrustError):
        directory.hold_folder("folder")
    assert (directory / "folder").__fspath__() == f"/proc/self/fd/{directory.descriptor()}/folder"
