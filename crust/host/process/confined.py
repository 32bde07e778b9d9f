"""Programs that read bytes which a guest may have written: one device, no privileges, few system calls.

A parser of filesystems that runs as root on a hostile disk is one bug away from the node. So e2fsck and blkid see a
root directory that holds /usr read-only and the device at `DEVICE`, and nothing else: no network, no other
process, no capability, bounded memory and CPU time, and of the kernel's system calls only the calls of such a
tool. bubblewrap (bwrap(1)) makes the namespaces, and libseccomp (seccomp_export_bpf(3)) the filter. The network
namespace is unshare(1)'s: bwrap would set up the loopback device in it, for which crust would need CAP_NET_ADMIN. So
CAP_SYS_ADMIN is all that this needs.

A status of bwrap must not be taken for a status of the program: 1 is "corrected" to e2fsck. So bwrap reports the
program's status apart (`--json-status-fd`), and without that report the program counts as never started.
"""

import ctypes
import errno
import functools
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    "access", "brk", "close", "dup", "dup2", "dup3", "faccessat", "fadvise64", "fallocate", "fcntl", "fdatasync",
    "fstat", "fstatfs", "fsync", "ftruncate", "futex", "getdents64", "getegid", "geteuid", "getgid", "getpid",
    "getppid", "getrandom", "getrlimit", "getrusage", "getuid", "gettid", "ioctl", "lseek", "lstat", "madvise",
    "mmap", "mprotect", "mremap", "munmap", "nanosleep", "clock_gettime", "clock_nanosleep", "newfstatat", "open",
    "openat", "pipe2", "poll", "ppoll", "pread64", "prlimit64", "pwrite64", "read", "readlink", "readlinkat",
    "readv", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sched_getaffinity", "sched_yield", "stat",
    "statfs", "statx", "sysinfo", "tgkill", "time", "uname", "write", "writev", "exit", "exit_group",
    "arch_prctl", "execve", "prctl", "rseq", "set_robust_list", "set_tid_address", "wait4",
)  # fmt: skip


_NOT_FOUND = 127
"""The status of prlimit(1) and unshare(1) for a program that does not exist."""


class CannotConfine(errors.RuntimeFailed):
    """A program cannot be confined on this host, so it reads no bytes that a guest may have written."""

    def __init__(self, program: str, why: str, hint: str = "") -> None:
        super().__init__(
            f"{program} was not run on a volume that a guest may have written", why=why, hint=hint
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """The memory and processor time of a confined program at most."""

    memory_bytes: int
    cpu_s: int


async def run_confined(
    program: Sequence[str],
    *,
    device: str,
    limits: Limits,
    timeout_s: float,
    inherits: Sequence[int] = (),
) -> commands.Completed:
    """Run `program`, whose arguments name `DEVICE`, on `device` to its end; any exit status is a result.

    Raises `CannotConfine` if it never ran, and the errors of `commands.run_command`.
    """
    with tempfile.TemporaryFile() as rules, tempfile.TemporaryFile() as report:
        rules.write(_filter(program[0]))
        rules.seek(0)
        argv = (
            *("prlimit", f"--as={limits.memory_bytes}", f"--cpu={limits.cpu_s}", "--core=0"),
            *("unshare", "--net", "--", "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-uts"),
            *("--cap-drop", "ALL", "--die-with-parent", "--chdir", "/"),
            *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
            *("--symlink", "usr/sbin", "/sbin", "--symlink", "usr/lib", "/lib"),
            *("--symlink", "usr/lib64", "/lib64", "--dev-bind", device, DEVICE),
            # e2fsck opens both. The kernel knows better than an mtab whether the device is mounted.
            *("--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/null", "/etc/mtab"),
            *("--seccomp", str(rules.fileno()), "--json-status-fd", str(report.fileno())),
            *("--", *program),
        )
        fds = (rules.fileno(), report.fileno(), *inherits)
        ended = await commands.run_command(argv, timeout_s=timeout_s, ok=range(256), inherits=fds)
        report.seek(0)
        for status in map(json.loads, report):
            if "exit-code" in status:
                return replace(ended, code=int(status["exit-code"]))
    raise _never_ran(program[0], ended)


def _never_ran(program: str, ended: commands.Completed) -> CannotConfine:
    """With the words of the tool that failed, and a hint where its cause is certain."""
    why, hint = ended.stderr_tail.strip() or f"bwrap exited with {ended.code}", ""
    if ended.code == _NOT_FOUND:
        hint = commands.install_hint("bwrap")
    elif why.startswith(f"bwrap: execvp {program}: "):
        hint = commands.install_hint(program)
    elif why.endswith(os.strerror(errno.EPERM)):
        hint = "give crust CAP_SYS_ADMIN, and a seccomp profile that allows unshare(2) and mount(2)"
    return CannotConfine(program, why, hint)


@functools.cache
def _filter(program: str) -> bytes:
    """The rules as the kernel takes them (struct sock_filter of seccomp(2))."""
    try:
        library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError as err:
        raise CannotConfine(program, str(err), "install the package libseccomp2") from err
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ANSWER_ENOSYS)))
    if context.value is None:
        raise CannotConfine(program, "libseccomp has no memory")
    try:
        for name in _SYSTEM_CALLS:
            number = library.seccomp_syscall_resolve_name(name.encode())
            # A call that this architecture does not have is below zero, and needs no rule.
            if number >= 0 and library.seccomp_rule_add(
                context, ctypes.c_uint32(_ALLOW), number, 0
            ):
                raise CannotConfine(program, f"libseccomp does not take a rule for {name}")
        with tempfile.TemporaryFile() as into:
            if library.seccomp_export_bpf(context, into.fileno()):
                raise CannotConfine(program, "libseccomp does not give its rules")
            into.seek(0)
            return into.read()
    finally:
        library.seccomp_release(context)
