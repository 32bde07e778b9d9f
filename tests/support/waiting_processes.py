"""Programs that wait until a test ends them, and a process that has no free descriptor."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting(program: str, *words: str, fds: tuple[int, ...] = ()) -> Iterator[int]:
    """A process that has run a program, with words as its arguments and descriptors; its pid."""
    command = [sys.executable, "-c", f"{program}; print(flush=True); import sys; sys.stdin.read()"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *words], stdin=pipe, stdout=pipe, pass_fds=fds) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """This process has no free descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
