"""Programs that read bytes which a guest may have written: one device, no privileges, few system calls.

A parser of filesystems that runs as root on a hostile disk is one bug away from the node. So e2fsck and blkid see a
read-only root directory that holds the directories of the program and of its libraries, and the device at `DEVICE`,
and nothing else: no network, no other process, no capability, and of the kernel's system calls only the calls of such
a tool. A program that only reads cannot open the device for writing. bubblewrap (bwrap(1)) makes the namespaces, and
libseccomp (seccomp_export_bpf(3)) the filter. The network namespace is unshare(1)'s: bwrap would set up the loopback
device in it, for which crust would need CAP_NET_ADMIN. So CAP_SYS_ADMIN is all that this needs.

The filter reads the commands of ioctl(2) and fcntl(2). With ioctl a program could detach or move its loop device, and
read the path of the image. With fcntl it could lock the file that has the locks of all volumes (`locks.ToolLocks`),
whose descriptor it inherits. It can close an inherited descriptor or read from it, and change nothing.

The memory of a program is its address space. Beside it are pipes, so it may open few files, and files in memory, so
its root directory takes none. Only so many programs of the same limits run at once, and the others wait. If the node
has no memory left, the kernel kills these programs first (choom(1)).

A status of bwrap must not be taken for a status of the program: 1 is "corrected" to e2fsck. So bwrap reports the
program's status apart (`--json-status-fd`), and without that report the program counts as never started.
"""

import asyncio
import ctypes
import errno
import fcntl
import functools
import json
import os
import re
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from crust.core import errors
from crust.host.process import commands

DEVICE = "/dev/volume"
"""Where the confined program finds the device."""

_ALLOW = 0x7FFF0000
_ANSWER_ENOSYS = 0x00050000 | errno.ENOSYS
"""SCMP_ACT_ALLOW and SCMP_ACT_ERRNO of seccomp_init(3). ENOSYS, because the C library then tries the older call."""

# Measured with strace(1) on e2fsck and blkid of Debian 12, with the calls of other C libraries. The last line is for
# bwrap and the loader: the filter is in force when bwrap executes the program, and its init waits for it.
_SYSTEM_CALLS = (
    "access", "brk", "close", "dup", "dup2", "dup3", "faccessat", "fadvise64", "fallocate", "fdatasync", "fstat",
    "fstatfs", "fsync", "ftruncate", "futex", "getdents64", "getegid", "geteuid", "getgid", "getpid",
    "getppid", "getrandom", "getrlimit", "getrusage", "getuid", "gettid", "lseek", "lstat", "madvise",
    "mmap", "mprotect", "mremap", "munmap", "nanosleep", "clock_gettime", "clock_nanosleep", "newfstatat", "pipe2",
    "poll", "ppoll", "pread64", "prlimit64", "pwrite64", "read", "readlink", "readlinkat",
    "readv", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sched_getaffinity", "sched_yield", "stat",
    "statfs", "statx", "sysinfo", "tgkill", "time", "uname", "write", "writev", "exit", "exit_group",
    "arch_prctl", "execve", "prctl", "rseq", "set_robust_list", "set_tid_address", "wait4",
)  # fmt: skip

# The sizes and properties of a block device, and whether a file is a terminal; nothing that changes either.
_IOCTLS = {
    "TCGETS": 0x5401,
    "BLKROGET": 0x125E,
    "BLKGETSIZE": 0x1260,
    "BLKSSZGET": 0x1268,
    "BLKIOMIN": 0x1278,
    "BLKIOOPT": 0x1279,
    "BLKALIGNOFF": 0x127A,
    "BLKPBSZGET": 0x127B,
    "BLKDISCARDZEROES": 0x127C,
    "BLKGETSIZE64": 0x80081272,
    "BLKGETZONESZ": 0x80041284,
}
_FCNTLS = (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL)
_COMMAND_MASK = 0xFFFFFFFF
"""The kernel reads 32 bits, and a C library may have set the bits above them."""
_MASKED_EQUAL = 7
"""SCMP_CMP_MASKED_EQ of seccomp_rule_add(3)."""

_OPEN_FILES = 64
_SCORE = 1000
"""Of proc_pid_oom_score_adj(5): the highest."""

_LDD_TIMEOUT_S = 60.0
_directories_of: dict[str, Sequence[str]] = {}
"""By the file of a program."""

_NOT_FOUND = 127
"""The status of prlimit(1), choom(1) and unshare(1) for a program that does not exist."""


class CannotConfine(errors.RuntimeFailed):
    def __init__(self, program: str, why: str, hint: str = "") -> None:
        super().__init__(
            f"{program} was not run on a volume that a guest may have written", why=why, hint=hint
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """The memory and processor time of a confined program at most, and how many with these limits run at once."""

    memory_bytes: int
    cpu_s: int
    at_once: int


async def run_confined(
    program: Sequence[str],
    *,
    device: str,
    limits: Limits,
    timeout_s: float,
    writable: bool = False,
    inherits: Sequence[int] = (),
) -> commands.Completed:
    """Run `program`, whose arguments name `DEVICE`, on `device` to its end; any exit status is a result.

    Only if `writable` can it open a file for writing, and the device is the only one. It waits for its turn before
    `timeout_s` begins. Raises `CannotConfine` if it never ran, and the errors of `commands.run_command`.
    """
    directories = await _directories(program[0])
    async with _turns(limits).taking():
        with tempfile.TemporaryFile() as rules, tempfile.TemporaryFile() as report:
            rules.write(_filter(program[0], writable=writable))
            rules.seek(0)
            argv = (
                *("prlimit", f"--as={limits.memory_bytes}", f"--cpu={limits.cpu_s}", "--core=0"),
                *(f"--nofile={_OPEN_FILES}", "choom", "-n", str(_SCORE), "--"),
                *("unshare", "--net", "--", "bwrap"),
                *("--unshare-ipc", "--unshare-pid", "--unshare-uts"),
                *("--cap-drop", "ALL", "--die-with-parent", "--chdir", "/"),
                *(word for path in directories for word in ("--ro-bind", path, path)),
                *("--symlink", "usr/bin", "/bin", "--symlink", "usr/sbin", "/sbin"),
                *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
                *("--dev-bind", device, DEVICE),
                # e2fsck opens both. The kernel knows better than an mtab whether the device is mounted.
                *("--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/null", "/etc/mtab"),
                *("--remount-ro", "/"),  # after all others, which make their places in it
                *("--seccomp", str(rules.fileno()), "--json-status-fd", str(report.fileno())),
                *("--", *program),
            )
            fds = (rules.fileno(), report.fileno(), *inherits)
            ended = await commands.run_command(
                argv, timeout_s=timeout_s, ok=range(256), inherits=fds
            )
            report.seek(0)
            for status in map(json.loads, report):
                if "exit-code" in status:
                    return replace(ended, code=int(status["exit-code"]))
    # it never ran: the words of the tool that failed, and a hint where its cause is certain
    why, hint = ended.stderr_tail.strip() or f"bwrap exited with {ended.code}", ""
    if ended.code == _NOT_FOUND:
        hint = commands.install_hint("bwrap")
    elif why.endswith(os.strerror(errno.EPERM)):
        hint = "give crust CAP_SYS_ADMIN, and a seccomp profile that allows unshare(2) and mount(2)"
    raise CannotConfine(program[0], why, hint)


@dataclass(eq=False)
class Turns:
    """At most so many blocks of `taking` run at the same time, in all threads of this process.

    Those that wait get their turn in the order in which they came. asyncio's semaphore belongs to one event loop, and
    threading's blocks the thread of one.
    """

    _free: int
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _waiting: deque[Future[None]] = field(default_factory=deque)

    @asynccontextmanager
    async def taking(self) -> AsyncIterator[None]:
        """Wait for a turn, and have it in the block. A caller that is cancelled leaves the queue."""
        turn: Future[None] = Future()
        with self._guard:
            if self._free:
                self._free -= 1
                turn.set_result(None)
            else:
                self._waiting.append(turn)
        try:
            await asyncio.wrap_future(turn)
            yield
        finally:
            if not turn.cancel():  # it was given
                self._give_back()

    def _give_back(self) -> None:
        with self._guard:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1


@functools.cache
def _turns(limits: Limits) -> Turns:
    return Turns(limits.at_once)


async def _directories(program: str) -> Sequence[str]:
    """The directories of the program's file, its loader and its libraries. Raises `CannotConfine`."""
    file = commands.find(program)
    if file is None:
        raise CannotConfine(program, "it is not installed", commands.install_hint(program))
    if file not in _directories_of:  # an update of a package moves no directory
        # 1 says that the program has no libraries.
        listed = await commands.run_command(("ldd", file), timeout_s=_LDD_TIMEOUT_S, ok=(0, 1))
        _directories_of[file] = _named(file, listed.stdout.decode("utf-8", "replace"))
    return _directories_of[file]


def _named(file: str, listed: str) -> Sequence[str]:
    """Of lines as "libc.so.6 => /lib/libc.so.6 (0x7f00)" and "/lib64/ld-linux.so.2 (0x7f01)"."""
    paths = (file, *re.findall(r"(/\S+) \(0x", listed))
    return tuple(sorted({os.path.realpath(os.path.dirname(path)) for path in paths}))


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp of <seccomp.h>."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    )


_Rule = tuple[str, tuple[_Comparison, ...]]
"""A system call that is allowed if all comparisons of its arguments are true."""


def _rules(*, writable: bool) -> Iterator[_Rule]:
    for name in _SYSTEM_CALLS:
        yield name, ()
    for name, allowed in (("ioctl", _IOCTLS.values()), ("fcntl", _FCNTLS)):
        for command in allowed:
            yield name, (_Comparison(1, _MASKED_EQUAL, _COMMAND_MASK, command),)
    for name, flags in (("open", 1), ("openat", 2)):
        reads = _Comparison(flags, _MASKED_EQUAL, os.O_ACCMODE, os.O_RDONLY)
        yield name, () if writable else (reads,)


@functools.cache
def _filter(program: str, *, writable: bool) -> bytes:
    """The rules as the kernel takes them (struct sock_filter of seccomp(2))."""
    try:
        library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError as err:
        raise CannotConfine(program, str(err), "install the package libseccomp2") from err
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ANSWER_ENOSYS)))
    if context.value is None:
        raise CannotConfine(program, "libseccomp has no memory")
    add, allow = library.seccomp_rule_add_array, ctypes.c_uint32(_ALLOW)
    try:
        for name, comparisons in _rules(writable=writable):
            number = library.seccomp_syscall_resolve_name(name.encode())
            array = (_Comparison * len(comparisons))(*comparisons)
            # a call that this architecture does not have is below zero, and needs no rule
            if number >= 0 and add(context, allow, number, len(comparisons), array):
                raise CannotConfine(program, f"libseccomp does not take a rule for {name}")
        with tempfile.TemporaryFile() as into:
            if library.seccomp_export_bpf(context, into.fileno()):
                raise CannotConfine(program, "libseccomp does not give its rules")
            into.seek(0)
            return into.read()
    finally:
        library.seccomp_release(context)
