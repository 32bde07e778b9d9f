"""What a test leaves: loop devices, mounts, child processes.

Compared before and after; only what is new counts, and of loop devices only those whose file lies in pytest's own
temporary directory, because others may use the machine. What leaked is removed, so that one bad test fails once.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from crust.core import errors
from crust.host.block import loop
from crust.host.mounts import mount_api, mountinfo
from tests.support.drivers import remnants

_KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "systemd-nspawn")
"""Children that Python itself starts with the first process of a pool, and keeps; and the machine of a file's
fixture, which a test may boot again.
"""


@dataclass(frozen=True, slots=True)
class Held:
    """What exists at a moment."""

    loops: frozenset[loop.LoopDevice]
    mounts: frozenset[tuple[int, str]]
    children: frozenset[int]

    @classmethod
    def now(cls, directory: Path) -> "Held":
        """What exists now; loop devices backed by files below `directory` only."""
        return cls(
            frozenset(remnants.devices(directory)),
            frozenset((m.mount_id, m.target) for m in mountinfo.read_all()),
            frozenset(
                pid for pid in children() if not any(kept in _command(pid) for kept in _KEPT)
            ),
        )

    def __sub__(self, other: "Held") -> "Held":
        return Held(
            self.loops - other.loops, self.mounts - other.mounts, self.children - other.children
        )


@contextmanager
def checked(directory: Path) -> Iterator[None]:
    """Fail if the block leaves loop devices, mounts or children."""
    before = Held.now(directory)
    yield
    left = Held.now(directory) - before
    complaints = [
        *(
            f"loop device {device.path} of {device.backing}"
            for device in sorted(left.loops, key=str)
        ),
        *(f"mount at {target}" for _, target in sorted(left.mounts)),
        *(f"child process {pid} ({_command(pid)})" for pid in sorted(left.children)),
    ]
    _clear(left)
    assert not complaints, f"leaked: {'; '.join(complaints)}"


def _clear(left: Held) -> None:
    # Processes first: they hold mounts and devices.
    for pid in left.children:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    # Later mounts first: one may lie on the other.
    for _, target in sorted(left.mounts, reverse=True):
        with suppress(errors.CrustError):
            mount_api.unmount(target)
    for device in left.loops:
        with suppress(errors.CrustError):
            loop.detach(device)


def children() -> Iterator[int]:
    """The pids of this process's children."""
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):
            text = Path(f"/proc/self/task/{task}/children").read_text(encoding="ascii")
            yield from map(int, text.split())


def _command(pid: int) -> str:
    with suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return "gone"
