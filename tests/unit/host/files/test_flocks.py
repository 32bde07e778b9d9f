"""Locks: one owner, whose death is known."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.files import flocks


def test_acquire_of_a_held_lock_names_the_holders_pid(tmp_path: Path) -> None:
    with flocks.ProcessLock.acquire(tmp_path / "lock"):
        with pytest.raises(flocks.LockHeld) as caught:
            flocks.ProcessLock.acquire(tmp_path / "lock")
        assert caught.value.pids == (os.getpid(),)
        assert str(os.getpid()) in str(caught.value)


def test_close_releases_the_lock_and_may_be_repeated(tmp_path: Path) -> None:
    lock = flocks.ProcessLock.acquire(tmp_path / "lock")
    lock.close()
    lock.close()
    flocks.ProcessLock.acquire(tmp_path / "lock").close()
    assert (tmp_path / "lock").exists()


def test_acquire_of_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("elsewhere")
    with pytest.raises(errors.Refused):
        flocks.ProcessLock.acquire(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()


def test_lock_is_released_when_its_process_dies(tmp_path: Path) -> None:
    code = (
        "import sys; from crust.host.files import flocks as ownership; "
        "lock = ownership.ProcessLock.acquire(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(flocks.LockHeld) as caught:
            flocks.ProcessLock.acquire(tmp_path / "lock")
        assert caught.value.pids == (owner.pid,)
        owner.kill()
        owner.wait()
    flocks.ProcessLock.acquire(tmp_path / "lock").close()


def test_lock_on_an_inherited_descriptor_lives_as_long_as_the_child(tmp_path: Path) -> None:
    """A claim's lock is handed to the hypervisor: it must outlive whoever took it, and no longer than the heir."""
    path = tmp_path / "claim"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    assert flocks.try_lock(fd)
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=(fd,),
    ) as heir:
        os.close(fd)
        other = os.open(path, os.O_RDWR)
        try:
            assert not flocks.try_lock(other)
            heir.kill()
            heir.wait()
            assert flocks.try_lock(other)
        finally:
            os.close(other)


def test_holder_pids_of_an_unlocked_file_are_empty(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert flocks.holder_pids(tmp_path / "file") == ()
    assert flocks.holder_pids(tmp_path / "absent") == ()
