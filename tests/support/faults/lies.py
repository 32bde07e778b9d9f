"""A kernel that does not answer: each call by which a question is asked fails once, with each errno.

`failures` asks again and again: the n-th call that concerns the given paths fails, and all others are real. A
question about a device or a process must not take that for "no". A read of a file object of Python is not among the
calls; its open is.
"""

import errno
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tests.support.faults import syncs

T = TypeVar("T")

ALL = os.environ.get("TESTS_LIES") == "all"
"""Whether each call fails with each errno, and each peer lies in each way."""

ERRNOS = (
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EIO,
    errno.ENOSYS,
    errno.ETIMEDOUT,
    errno.ESTALE,
)
"""No answer to any question: of a privilege, a limit, a device, a kernel, a server."""

_STATX = "crust.host.process.syscalls._statx"
CALLS = (
    "open",
    "read",
    "pread",
    "listdir",
    "scandir",
    "readlink",
    "stat",
    "lstat",
    "fstat",
    "statvfs",
    "pidfd_open",
    "builtins.open",
    "io.open",
    "fcntl.ioctl",
    "fcntl.fcntl",
    _STATX,
)
"""The calls that ask, as crust's packages and the standard library call them."""

CHANGES = (
    "write",
    "pwrite",
    "fsync",
    "fdatasync",
    "lseek",
    "ftruncate",
    "posix_fallocate",
    "copy_file_range",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
    "chmod",
    "fchmod",
)
"""The calls that change files and make them durable, and the one that finds their data."""


@dataclass(frozen=True, slots=True)
class Concerns:
    """The paths that a question is about: these alone, and these with all that is below them."""

    alone: frozenset[str]
    with_all: tuple[str, ...]

    def has(self, path: str) -> bool:
        """Whether the path is one of them."""
        roots = (root for root in self.with_all if path == root or path.startswith(f"{root}/"))
        return path in self.alone or any(roots)


@dataclass
class Failure:
    """The call that fails."""

    number: int
    """Its number among the calls that concern the paths, from 0; -1: none fails."""
    errno: int
    call: str = ""
    """The call and its path, when it has failed."""

    def __str__(self) -> str:
        return f"{self.call}: {errno.errorcode[self.errno]}"


@dataclass
class _Kernel:
    """Counts the calls, and knows the descriptors of what they opened."""

    concerns: Concerns
    failure: Failure
    calls: Sequence[str]
    count: int = 0
    paths: dict[int, str] = field(default_factory=dict)

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        path = self._path(name, arguments)
        if path is None or name not in self.calls:
            return
        self.count += 1
        if self.count - 1 == self.failure.number:
            self.failure.call = f"{name.rpartition('.')[2]} {path}"
            number = self.failure.errno
            raise OSError(number, os.strerror(number), path)

    def after(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        if name != "open":
            return
        self.paths.pop(result, None)  # the descriptor was another file's
        path = self._path(name, arguments)
        if path is not None:
            self.paths[result] = path

    def _path(self, name: str, arguments: tuple[Any, ...]) -> str | None:
        """The path that a call is about, if it is one of `concerns`."""
        about = arguments[0] if arguments else "."
        if name == "pidfd_open":
            about = f"/proc/{about}"
        if name == _STATX and arguments[1]:  # a directory, and a path below it
            about = arguments[1]
        if hasattr(about, "fileno"):
            about = about.fileno()
        if isinstance(about, int):
            return self.paths.get(about)
        path = _of_held(os.fsdecode(about))
        return path if self.concerns.has(path) else None


_HELD = re.compile(r"(/proc/self/fd/\d+)(/.*)")
_readlink = os.readlink


def _of_held(path: str) -> str:
    """The path as people know it: one below a held directory names the directory's descriptor."""
    held = _HELD.fullmatch(path)
    return path if held is None else os.path.normpath(_readlink(held[1]) + held[2])


@contextmanager
def failing(
    concerns: Concerns, failure: Failure, *, calls: Sequence[str] = CALLS
) -> Iterator[Callable[[], int]]:
    """This call of `calls` fails while the block runs, once; yields a counter of the calls so far."""
    kernel = _Kernel(concerns, failure, calls)
    with syncs.watched({*calls, "open"}, before=kernel.before, after=kernel.after):
        yield lambda: kernel.count


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """One run of a question: the call that failed, and the value or the exception."""

    failure: Failure
    value: T | None = None
    error: Exception | None = None


def failures(
    ask: Callable[[], T], concerns: Concerns, *, errnos_of: Callable[[int], Sequence[int]]
) -> Iterator[Asked[T]]:
    """Ask for each call, and each errno that `errnos_of` gives for its number, until no call is left to fail."""
    for number in itertools.count():
        for each in errnos_of(number):
            failure = Failure(number, each)
            with failing(concerns, failure):
                asked = _run(ask, failure)
            if not failure.call:
                return
            yield asked


def _run(ask: Callable[[], T], failure: Failure) -> Asked[T]:
    try:
        return Asked(failure, value=ask())
    except Exception as error:  # which one is for the test to judge
        return Asked(failure, error=error)


def in_turn(first: int) -> Callable[[int], Sequence[int]]:
    """One errno for each call, from the `first` of the list on, so that many calls get all of them."""
    return lambda number: (ERRNOS[(number + first) % len(ERRNOS)],)


def all_errnos(_number: int) -> Sequence[int]:
    """Each errno for each call."""
    return ERRNOS
