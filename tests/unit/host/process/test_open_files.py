"""The processes that lock a file, and those that another one watches."""

import os
from pathlib import Path

import pytest

from crust.host import answers
from crust.host.process import open_files
from tests.support.waiting_processes import no_free_descriptor, waiting


def test_holder_of_lock_is_found_by_any_path(tmp_path: Path) -> None:
    """As a process of another mount namespace has; one that only has the file open is no holder."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    path = f"{tmp_path}/one/claim.lock"
    Path(path).touch()
    os.link(path, tmp_path / "two" / "claim.lock")
    (tmp_path / "claim.lock").touch()
    opening = "import fcntl, sys; file = open(sys.argv[1])"
    locking = f"{opening}; fcntl.flock(file, fcntl.LOCK_EX)"
    with (
        waiting(locking, f"{tmp_path}/two/claim.lock") as holder,
        waiting(locking, f"{tmp_path}/claim.lock") as stranger,
        waiting(opening, path) as reader,
    ):
        assert open_files.holders(path) == [holder]
        paths = (path, f"{tmp_path}/claim.lock", f"{tmp_path}/absent/claim.lock")
        assert [open_files.locked(pid, paths) for pid in (holder, stranger, reader)] == [
            {paths[0]}, {paths[1]}, set()
        ]  # fmt: skip
    assert not open_files.locked(holder, paths)
    assert open_files.holders(path) == []
    assert open_files.holders(f"{tmp_path}/absent") == []


def test_process_that_cannot_be_looked_at_has_perhaps_the_lock(tmp_path: Path) -> None:
    """No descriptor is free: nobody can say whether the process has it."""
    path = f"{tmp_path}/claim.lock"
    Path(path).touch()
    locking = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX)"
    unseen = pytest.raises(answers.NotSeen, match=r"locks of process .*EMFILE")
    with waiting(locking, path) as holder, no_free_descriptor(), unseen:
        open_files.locked(holder, (path,))


def test_process_that_is_watched_by_a_pidfd_is_named() -> None:
    with waiting("pass") as watched:
        pidfd = os.pidfd_open(watched)
        with waiting("pass", fds=(pidfd,)) as watcher:
            assert open_files.watched(watcher) == {watched}
            with no_free_descriptor(), pytest.raises(answers.NotSeen, match="EMFILE"):
                open_files.watched(watcher)
            with no_free_descriptor():
                assert open_files.holders("/proc/self/status") == []
        os.close(pidfd)
    assert open_files.watched(watched) == set()
