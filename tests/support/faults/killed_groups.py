"""A process and all that it started, killed at once: a process group, a control group, a PID namespace.

systemd kills a control group, the end of a container a PID namespace, a terminal a process group.
"""

import ctypes
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_TIMEOUT_MS = 60_000
_libc = ctypes.CDLL(None, use_errno=True)

Life = Callable[[], None]
Killed = tuple[int, Callable[[], None]]
"""The process that runs the life, and what kills it with its group."""


def fork(life: Life) -> int:
    """Run `life` in a child, which is gone when it ends."""
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            life()
        os._exit(1)
    return pid


@contextmanager
def process_group(life: Life, directory: Path) -> Iterator[Killed]:
    """The processes that do not make a session of their own."""

    def alone() -> None:
        os.setpgid(0, 0)
        life()

    leader = fork(alone)
    yield leader, lambda: os.killpg(leader, signal.SIGKILL)


@contextmanager
def control_group(life: Life, directory: Path) -> Iterator[Killed]:
    """All descendants, whatever session or namespace they make: cgroup.kill."""
    hierarchy = directory / "cgroup"
    hierarchy.mkdir()
    subprocess.run(["mount", "-t", "cgroup2", "none", str(hierarchy)], check=True)
    group = hierarchy / f"crust-test-{os.getpid()}"
    group.mkdir()

    def alone() -> None:
        _write(group / "cgroup.procs", "0")
        life()

    def kill() -> None:
        _write(group / "cgroup.kill", "1")

    try:
        yield fork(alone), kill
    finally:
        kill()
        _wait_until_empty(group)
        group.rmdir()
        subprocess.run(["umount", str(hierarchy)], check=True)


@contextmanager
def pid_namespace(life: Life, directory: Path) -> Iterator[Killed]:
    """All descendants: `life` is process 1 of the namespace, as in a container, with a /proc of its own for bwrap."""
    number, tell = os.pipe()

    def init() -> None:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
        life()

    def container() -> None:
        assert _libc.unshare(_CLONE_NEWPID | _CLONE_NEWNS) == 0
        os.write(tell, str(fork(init)).encode())

    fork(container)
    os.close(tell)
    first = int(os.read(number, 20))
    os.close(number)
    yield first, lambda: os.kill(first, signal.SIGKILL)


GROUPS: dict[str, Callable[[Life, Path], AbstractContextManager[Killed]]] = {
    "process group": process_group,
    "control group": control_group,
    "PID namespace": pid_namespace,
}


def wait_for_death(*pidfds: int) -> None:
    """Until each process is dead, its threads included; closes the descriptors."""
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(_TIMEOUT_MS), "it does not die"
        os.close(pidfd)


def _wait_until_empty(group: Path) -> None:
    with (group / "cgroup.events").open(encoding="utf-8") as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        while "populated 0" not in events.read():
            assert poll.poll(_TIMEOUT_MS), "the control group does not become empty"
            events.seek(0)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="ascii")
