"""Die, or fail, at every system call of an operation in turn.

`crash_points` forks for each point: the child runs the operation and is gone, as by kill -9, right before the n-th
call that changes the filesystem; the parent then looks at what is left. `failure_points` raises an errno there.
"""

import errno
import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.support.faults import syncs

CALLS = (
    "open",
    "write",
    "pwrite",
    "fsync",
    "fdatasync",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
    "chmod",
    "fchmod",
    "utime",
)
"""What changes files or makes them durable, as crust's packages call it. An open that only reads changes nothing."""

_OPENS_TO_WRITE = os.O_CREAT | os.O_WRONLY | os.O_RDWR


@contextmanager
def at_call(
    number: int, act: Callable[[str], None], *, calls: Sequence[str] = CALLS
) -> Iterator[Callable[[], int]]:
    """Run `act(name)` before the `number`-th of `calls` (from 0); yields a counter of the calls so far."""
    count = 0

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if name == "open" and not arguments[1] & _OPENS_TO_WRITE:
            return
        count += 1
        if count - 1 == number:
            act(name)

    with syncs.watched(calls, before=before):
        yield lambda: count


def crash_points(
    prepare: Callable[[int], None], operation: Callable[[int], None], *, within: range = range(1000)
) -> Iterator[int]:
    """Yield after each crash of `operation(n)`, n counting up, until one run of it comes through unharmed.

    `prepare(n)` runs before each, undisturbed. `within` is for an operation of which a part is proven elsewhere.
    """
    for number in within:
        prepare(number)
        if not _dies_at(number, operation):
            return
        yield number
    assert within.stop < 1000, "the operation has no end"


def failure_points(
    prepare: Callable[[int], None], operation: Callable[[int], None], *, within: range = range(1000)
) -> Iterator[tuple[int, Exception]]:
    """Like `crash_points`, with ENOSPC raised once at each point; yields the error that came out of the operation."""
    for number in within:
        prepare(number)
        with at_call(number, no_space) as count:
            try:
                operation(number)
            except Exception as error:  # which one is for the test to judge
                yield number, error
            else:
                if count() <= number:
                    return
    assert within.stop < 1000, "the operation has no end"


def _dies_at(number: int, operation: Callable[[int], None]) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        gc.freeze()  # gRPC's objects of other tests: their ends wait for threads that this process does not have
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


def no_space(name: str) -> None:
    """For `at_call`: the disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


class Killed(BaseException):
    """The process dies here, with everything in its memory."""


def killed(_name: str) -> None:
    """For `at_call`: the process dies, as far as the caller can see."""
    raise Killed
