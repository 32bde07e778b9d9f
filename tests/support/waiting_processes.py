"""Programs that wait until a test ends them, and a process that has no free descriptor."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting(code: str, *arguments: str, fds: tuple[int, ...] = ()) -> Iterator[int]:
    """Another process that has run `code`, and lives while the block runs; its pid."""
    argv = [
        sys.executable,
        "-c",
        f"import os, sys\n{code}\nprint(flush=True)\nsys.stdin.read()",
        *arguments,
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, pass_fds=fds) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process.pid


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """This process has no free descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
