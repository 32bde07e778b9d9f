"""The processes that have block devices open: one look at the open files of all processes.

A process or a descriptor that ended meanwhile has no device open: the errnos for that are named here. Every other
errno is no answer, and no answer is `NotSeen`: a look that misses a process would call a device unused. Which
processes the kernel may hide: crust/host/process/hidden.py.
"""

import errno
import fcntl
import math
import os
import termios
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from crust.core import volumes
from crust.core.printable import printable
from crust.host import answers
from crust.host.block.holders import Holder
from crust.host.process import arguments, hidden, open_files, processes, syscalls

Number = tuple[int, int]
Openers = Mapping[Number, tuple[Holder, ...]]
"""The processes that have block devices open, by the device's number."""

NEEDS = "CAP_SYS_PTRACE, and the host's PID namespace"
"""The privilege for the open files of all processes (proc_pid_fd(5), ptrace(2))."""

_LOOK_S = 2.0
"""How much CPU one look may take: 7 us a descriptor, so 200,000 open files are seen. A tenant could make it minutes.

The time that a busy machine keeps the look waiting says nothing of the processes, and refuses nothing.
"""
_LISTINGS = 2
"""The second shows the children of processes that forked and ended during the look, as a daemon does at its start."""
_FILES_AT_ONCE = 256


def openers() -> Openers:
    """The processes that have block devices open; raises `NotSeen`. Blocks.

    One look at all processes serves all callers that began to wait before it began: each of them has its lock by
    then. The process that serves a network block device (`pid` in sysfs: rbd-nbd, qemu-nbd) has it open all the time,
    and is no user of it.
    """
    global _next
    mine = _next
    with mine.lock:
        if mine.result is None:
            with _running:
                _next = _Look()  # a later caller needs a later look
                found = answers.ask("the open files of all processes", _openers, needs=NEEDS)
                mine.result = answers.seen(found) or {}
    return mine.result


def check_visible(pid: int) -> None:
    """Raise `NotSeen` unless the open files of process `pid`, which runs, can be seen. Blocks.

    0 is a process of another PID namespace, as SO_PEERCRED says (unix(7)): no look at all processes would list it.
    """
    what = f"the open files of process {pid}"
    if not pid:
        raise answers.NotSeen(
            "cannot see the processes of a peer",
            why="it is in a PID namespace that cannot be seen from here",
            hint="run crust in the PID namespace of the runtimes: in a pod, hostPID: true",
        )
    question = answers.ask(what, lambda: [*open_files.links(pid)], needs=NEEDS)
    if not answers.seen(question):
        why, hint = "the kernel shows none of a process that runs", f"it needs {NEEDS}"
        raise answers.NotSeen(f"cannot see {what}", why=why, hint=hint)


@dataclass(eq=False, slots=True)
class _Look:
    """A look that has not begun, or its result."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    result: Openers | None = None


_next = _Look()
"""For the callers that come now: the kernel's list of processes is one for this process, and so is the look at it."""
_running = threading.Lock()


def opened_by(pid: int, devices: Collection[volumes.DeviceIdentity]) -> set[volumes.DeviceIdentity]:
    """Those of the devices that the process has open; none if it has ended. Raises `NotSeen`. Blocks."""
    answer = answers.ask(
        f"the open files of process {pid}",
        lambda: {number for _, number in _devices_of(str(pid))},
        needs=NEEDS,
    )
    numbers = answers.seen(answer) or set()
    return {device for device in devices if (device.major, device.minor) in numbers}


def _openers() -> Openers:
    """Small processes come first, so that one with many files delays what is known of the others least."""
    found: dict[Number, tuple[Holder, ...]] = {}
    looked: set[str] = set()
    deadline_s = time.thread_time() + _LOOK_S
    for _ in range(_LISTINGS):
        pids = [pid for pid in os.listdir("/proc") if pid.isdecimal() and pid not in looked]
        for pid in sorted(pids, key=_number_of_files):
            for fd, number in _devices_of(pid, deadline_s, of_all=True):
                writes = _writes(pid, fd)
                server = f"/sys/dev/block/{number[0]}:{number[1]}/pid"
                if writes is not None and syscalls.known_attribute(server) != pid:
                    holder = Holder(int(pid), arguments.command_of(int(pid)), f"fd {fd}", writes)
                    found[number] = (*found.get(number, ()), holder)
        looked.update(pids)
    return found


def _number_of_files(pid: str) -> int:
    """How many files a process has open: the size of the directory since Linux 6.2, 0 before (proc_pid_fd(5))."""
    try:
        return os.stat(f"/proc/{pid}/fd").st_size
    except OSError as err:
        if err.errno not in (*hidden.ENDED, *hidden.HIDDEN):
            raise
        return 0


def _devices_of(
    pid: str, deadline_s: float = math.inf, *, of_all: bool = False
) -> Iterator[tuple[str, Number]]:
    """The descriptors of block devices of a process; none if it has ended. Raises `NotSeen` after the deadline.

    `of_all`: in a look at all processes, one that may hide has the devices that the kernel shows.
    """
    names = _descriptors_of(pid, of_all=of_all)
    for index, fd in enumerate(names):
        if index % _FILES_AT_ONCE == 0 and time.thread_time() > deadline_s:
            # unknown is in use, so no process is skipped
            raise answers.NotSeen(
                "cannot see the open files of all processes",
                why=f"the look takes more than {_LOOK_S:g} s of CPU, at {_described(pid)}, "
                f"with {len(names)} open files",
                hint="limit the open files of that process (RLIMIT_NOFILE), or end it",
            )
        try:
            device = _device_of(pid, fd)
        except OSError as err:
            if of_all and err.errno in hidden.HIDDEN:
                _check_may_hide(pid, err)
            elif err.errno not in hidden.ENDED:
                raise
            continue  # closed meanwhile, or of a process that may hide
        if device is not None:
            yield fd, device


def _device_of(pid: str, fd: str) -> Number | None:
    """The block device that a descriptor is of; None if it is of another file. Raises `OSError`."""
    path = f"/proc/{pid}/fd/{fd}"
    name = os.readlink(path)
    if name[0] != "/" or name == "/dev/null":  # a socket, a pipe
        return None
    try:
        device = syscalls.block_device_at(path)
    except OSError as err:
        # for every file on an xfs whose disk has failed, or of a FUSE server that has changed its type
        if err.errno != errno.EIO or _may_be_device(pid, fd):
            raise
        return None
    return None if device is None else (os.major(device), os.minor(device))


def _may_be_device(pid: str, fd: str) -> bool:
    """Whether a descriptor is open, and neither of a directory nor of a regular file: by what the kernel answers for
    those without their filesystem (Linux fs/namei.c, path_init; fs/ioctl.c, FIONREAD). Raises `OSError`.
    """
    process = answers.seen(processes.of(int(pid)))
    if process is None:
        return False
    with processes.holding(process) as pidfd:
        if pidfd is None:
            return False
        try:
            with syscalls.closing(syscalls.copy_descriptor(pidfd, int(fd))) as copy:
                if not _is_directory(copy):
                    fcntl.ioctl(copy, termios.FIONREAD, bytes(4))
        except OSError as err:
            # EBADF: it was closed meanwhile, or is of O_PATH, which opens no device; EINVAL: a loop device
            if err.errno not in (errno.ENOTTY, errno.EINVAL, errno.EBADF):
                raise
            return err.errno != errno.EBADF
    return False


def _is_directory(fd: int) -> bool:
    try:
        os.close(os.open(".", os.O_PATH | os.O_CLOEXEC, dir_fd=fd))
    except OSError as err:
        if err.errno not in (errno.ENOTDIR, errno.EIO):
            raise
        return err.errno == errno.EIO  # of the filesystem, which is asked for directories alone
    return True


def _descriptors_of(pid: str, *, of_all: bool) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError as err:
        if of_all and err.errno in hidden.HIDDEN:
            _check_may_hide(pid, err)
        elif err.errno not in hidden.ENDED:
            raise
        return []


def _check_may_hide(pid: str, err: OSError) -> None:
    """Raise `NotSeen`, which names the process that the kernel hides, unless it may be hidden."""
    if hidden.may_hide(pid):
        return
    raise answers.NotSeen(
        "cannot see the open files of all processes",
        why=f"{syscalls.reason(err)}, of {_described(pid)}",
        hint=f"it needs {NEEDS}; if a security module hides that process and it uses no volume, except its control "
        "group (excepted_groups)",
    ) from err


def _described(pid: str) -> str:
    uid = answers.ask(f"process {pid}", lambda: os.stat(f"/proc/{pid}").st_uid, absent=hidden.ENDED)
    user = f"user {uid.value}" if isinstance(uid, answers.Present) else "an unknown user"
    group = answers.ask(f"process {pid}", lambda: hidden.group_of(pid))
    place = printable(group.value) if isinstance(group, answers.Present) else ""
    command = arguments.command_of(int(pid))
    return f"process {pid} ({command}) of {user} in the control group {place or '?'}"


def _writes(pid: str, fd: str) -> bool | None:
    """Whether the descriptor may write; None if it was closed meanwhile (proc_pid_fdinfo(5))."""
    try:
        text = syscalls.read_whole(f"/proc/{pid}/fdinfo/{fd}")
    except OSError as err:
        if err.errno not in hidden.ENDED:
            raise
        return None
    flags = next(line for line in text.split(b"\n") if line.startswith(b"flags:"))
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
