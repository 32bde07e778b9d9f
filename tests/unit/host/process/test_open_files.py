"""Which processes have a file open, and which processes they watch."""

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


def test_holder_that_opened_the_file_by_another_path_is_found(tmp_path: Path) -> None:
    """As a process of another mount namespace has."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "claim.lock").touch()
    os.link(tmp_path / "one" / "claim.lock", tmp_path / "two" / "claim.lock")
    (tmp_path / "claim.lock").touch()
    with (
        _process("file = open(__import__('sys').argv[1])", f"{tmp_path}/two/claim.lock") as holder,
        _process("file = open(__import__('sys').argv[1])", f"{tmp_path}/claim.lock"),
    ):
        assert open_files.holders(f"{tmp_path}/one/claim.lock") == [holder]
    assert open_files.holders(f"{tmp_path}/one/claim.lock") == []
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
