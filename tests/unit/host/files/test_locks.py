"""Locks have one owner, whose death is known."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.files import locks


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


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_lock_that_may_not_be_asked_for_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A security module refuses it: a lock that somebody holds gives EAGAIN (fcntl(2), F_OFD_SETLK)."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with (tmp_path / "lock").open("w") as file, pytest.raises(errors.Refused):
        locks.try_lock(file.fileno())


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
