"""Which processes have a lock on a file, and which processes they watch."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crust.host.process import arguments, open_files


@contextmanager
def _process(program: str, *words: str, fds: tuple[int, ...] = ()) -> Iterator[int]:
    command = [sys.executable, "-c", f"{program}; print(flush=True); import sys; sys.stdin.read()"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *words], stdin=pipe, stdout=pipe, pass_fds=fds) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_holder_of_a_lock_is_found_by_any_path_of_its_file(tmp_path: Path) -> None:
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
        _process(locking, f"{tmp_path}/two/claim.lock") as holder,
        _process(locking, f"{tmp_path}/claim.lock") as stranger,
        _process(opening, path) as reader,
    ):
        assert open_files.holders(path) == [holder]
        assert open_files.holders(path, [stranger, reader]) == []
    assert open_files.holders(path) == []
    assert open_files.holders(f"{tmp_path}/absent") == []


def test_process_that_is_watched_by_a_pidfd_is_named() -> None:
    with _process("pass") as watched:
        pidfd = os.pidfd_open(watched)
        with _process("pass", fds=(pidfd,)) as watcher:
            assert open_files.watched(watcher) == {watched}
        os.close(pidfd)
    assert open_files.watched(watched) == set()


def test_processes_are_found_by_whole_words_of_their_arguments() -> None:
    with _process("pass", "-id", "sandbox-0001") as process:
        assert list(arguments.having("-id", "sandbox-0001")) == [process]
        assert list(arguments.having("-id", "sandbox-000")) == []
        assert list(arguments.having("sandbox-0001", "-id")) == []
