"""Die, or fail, at every system call of an operation in turn.

`crash_points` forks for each point: the child runs the operation and is gone, as by kill -9, right before the n-th
call that changes the filesystem; the parent then looks at what is left. `failure_points` raises an errno there.
"""

import errno
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

CALLS = (
    "open",
    "write",
    "fsync",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
    "chmod",
    "fchmod",
    "utime",
)
"""What changes files or makes them durable, as crust's rooms call it."""


@contextmanager
def at_call(
    number: int, act: Callable[[str], None], *, calls: Sequence[str] = CALLS
) -> Iterator[Callable[[], int]]:
    """Run `act(name)` before the `number`-th of `calls` (from 0); yields a counter of the calls so far."""
    count = 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count - 1 == number:
                act(name)
            return real(*args, **kwargs)

        return called

    saved = {name: getattr(os, name) for name in calls}
    for name, real in saved.items():
        setattr(os, name, wrap(name, real))
    try:
        yield lambda: count
    finally:
        for name, real in saved.items():
            setattr(os, name, real)


def crash_points(prepare: Callable[[int], None], operation: Callable[[int], None]) -> Iterator[int]:
    """Yield after each crash of `operation(n)`, n counting up, until one run of it comes through unharmed.

    `prepare(n)` runs before each, undisturbed.
    """
    for number in range(1000):
        prepare(number)
        if not _dies_at(number, operation):
            return
        yield number
    raise AssertionError("the operation has no end")


def failure_points(
    prepare: Callable[[int], None], operation: Callable[[int], None]
) -> Iterator[tuple[int, Exception]]:
    """Like `crash_points`, with ENOSPC raised once at each point; yields the error that came out of the operation."""
    for number in range(1000):
        prepare(number)
        with at_call(number, _no_space) as count:
            try:
                operation(number)
            except Exception as error:
                yield number, error
            else:
                if count() <= number:
                    return
    raise AssertionError("the operation has no end")


def _dies_at(number: int, operation: Callable[[int], None]) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with at_call(number, lambda _name: os.kill(os.getpid(), signal.SIGKILL)):
                operation(number)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the operation failed without being disturbed"
    return False


def _no_space(name: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
