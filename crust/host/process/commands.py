"""Other programs: an argument list, a deadline, bounded output; each is always waited for.

A program runs in a session of its own, with LC_ALL=C, a fixed PATH and no other environment. When the deadline passes
or the caller is cancelled, its whole process group gets SIGTERM, then SIGKILL, and is waited for before the call
returns: a mkfs that outlives its call would format a device that by then belongs to another volume.

Standard output goes to a pipe, whose end also says that no child of the program is left, and standard error to a file
in memory: a second pipe would cost a first stage 3 % of its time.

Not asyncio's subprocess: it reads a program's exit before crust has sent the last signal, so this signal could reach
another group of that number; and in Python 3.11 it has a thread for each program, which costs a first stage 3 % of
its time. Not preexec_fn: with it the start is a fork, 20 ms at 300 MiB, where a spawn takes one.
"""

import asyncio
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from crust.core import errors
from crust.host.process import syscalls

STDERR_TAIL_BYTES = 4096
OUTPUT_LIMIT_BYTES = 1024 * 1024
_GRACE_S = 2.0
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs are. Not /usr/local: on some distributions users other than root may write there."""
_ENVIRONMENT = {"LC_ALL": "C", "PATH": PATH}

_PACKAGES = {
    "bwrap": "bubblewrap",
    "blkid": "util-linux",
    "prlimit": "util-linux",
    "ldd": "libc-bin",
    "mkfs.ext4": "e2fsprogs",
    "e2fsck": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "mkfs.btrfs": "btrfs-progs",
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
}


@dataclass(frozen=True, slots=True)
class Completed:
    """How a program ended. `code` is its exit status, minus the signal's number if one killed it."""

    code: int
    stdout: bytes
    stderr_tail: str


class CommandFailed(errors.RuntimeFailed):
    def __init__(self, argv: Sequence[str], code: int, stderr_tail: str, *, why: str = "") -> None:
        ended = f"it exited with {code}" if code >= 0 else f"it was killed by signal {-code}"
        output = f": {stderr_tail.strip()}" if stderr_tail.strip() else ""
        super().__init__(f"{shlex.join(argv)} failed", why=(why or ended) + output)
        self.stderr_tail = stderr_tail


async def run_command(
    argv: Sequence[str], *, timeout_s: float, ok: Sequence[int] = (0,), inherits: Sequence[int] = ()
) -> Completed:
    """Run a program to its end; raises `CommandMissing`, `CommandFailed`, `CommandTimedOut`.

    Its standard input is empty. Standard output beyond the limit is a failure; of the standard error before the limit
    the last 4 KiB are kept. The program has the descriptors `inherits` open as long as it runs, even if crust dies.
    """
    stdout = bytearray()
    with _started(argv, inherits) as program:
        try:
            async with asyncio.timeout(timeout_s):
                while len(stdout) <= OUTPUT_LIMIT_BYTES:
                    await _readable(program.stdout)
                    chunk = os.read(program.stdout, 65536)
                    if not chunk:
                        break
                    stdout += chunk
                else:
                    _signal(program.process, signal.SIGKILL)
                await _readable(program.pidfd)
        except TimeoutError as err:
            await _end(program)
            raise errors.RuntimeFailed.named(
                "CommandTimedOut",
                f"{shlex.join(argv)} failed",
                why=f"it did not end within {timeout_s:g} s and was killed",
            ) from err
        except BaseException:
            await _end(program)
            raise
        code, end = program.process.wait(), os.lseek(program.stderr, 0, os.SEEK_CUR)
        start = max(end - STDERR_TAIL_BYTES, 0)
        tail = os.pread(program.stderr, end - start, start).decode("utf-8", "replace")
    if len(stdout) > OUTPUT_LIMIT_BYTES:
        raise CommandFailed(argv, code, tail, why=f"it wrote more than {OUTPUT_LIMIT_BYTES} bytes")
    if code not in ok:
        raise CommandFailed(argv, code, tail)
    return Completed(code, bytes(stdout), tail)


def find(program: str) -> str | None:
    """The file that `run_command` would execute for the name; None if there is none."""
    return shutil.which(program, path=_ENVIRONMENT["PATH"])


def install_hint(program: str) -> str:
    """What to do about a program that is missing."""
    package = _PACKAGES.get(os.path.basename(program))
    return f"install the package {package}" if package else "install it, or correct its path"


@dataclass(frozen=True, slots=True)
class _Program:
    """A program whose exit is not read yet: no other process or group gets its number."""

    process: subprocess.Popen[bytes]
    stdout: int
    stderr: int
    """A file in memory. The program's copies of the descriptor share its position, the end of what was written."""
    pidfd: int


@contextmanager
def _started(argv: Sequence[str], inherits: Sequence[int]) -> Iterator[_Program]:
    """A started program, whose descriptors are closed after the block."""
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with syscalls.closing(stderr):
        # the kernel then refuses a write beyond its size (fcntl(2), F_SEAL_GROW)
        os.ftruncate(stderr, OUTPUT_LIMIT_BYTES)
        fcntl.fcntl(stderr, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        try:
            process = subprocess.Popen(
                argv,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=_ENVIRONMENT,
                start_new_session=True,
                pass_fds=inherits,
            )
        except FileNotFoundError as err:
            raise errors.RuntimeFailed.named(
                "CommandMissing", f"{argv[0]} is not installed", hint=install_hint(argv[0])
            ) from err
        except OSError as err:
            raise syscalls.translate(err, f"cannot start {argv[0]}") from err
        assert process.stdout is not None
        with process.stdout as stdout:
            try:
                pidfd = os.pidfd_open(process.pid)  # no other gets its number before it is reaped
            except OSError as err:  # no descriptor is free
                _signal(process, signal.SIGKILL)
                process.wait()
                raise syscalls.translate(err, f"cannot watch {argv[0]}") from err
            with syscalls.closing(pidfd):
                os.set_blocking(stdout.fileno(), False)
                yield _Program(process, stdout.fileno(), stderr, pidfd)


async def _readable(fd: int) -> None:
    """Wait for a pipe's data or end, or, by a pidfd, for the end of a process, which stays a zombie."""
    loop, seen = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, seen.set)
    try:
        await seen.wait()
    finally:
        loop.remove_reader(fd)


async def _end(program: _Program) -> None:
    """Terminate and wait for the process group; a second cancellation only skips the grace period."""
    _signal(program.process, signal.SIGTERM)
    ended = asyncio.ensure_future(_readable(program.pidfd))
    try:
        await asyncio.wait((ended,), timeout=_GRACE_S)
    finally:
        # Also when the leader has ended: its children are in the group.
        _signal(program.process, signal.SIGKILL)
        await ended
        program.process.poll()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
