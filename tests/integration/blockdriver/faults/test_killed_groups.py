"""The driver is killed with all that it started, in the middle of mkfs and of e2fsck.

A program that waits for a disk which hangs survives SIGKILL until the disk answers: its descriptors stay open, and
its write may still come. No disk hangs here. strace stops the program after some of its writes, and the test takes
copies of its descriptors (pidfd_getfd(2)), which stand for the dying program. The driver's next life is refused the
volume until the last copy of the lock is closed. Then it converges: what is not complete is made again, what is
complete is kept.
"""

import asyncio
import ctypes
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from crust.host.block import loop
from crust.host.filesystems import superblocks
from crust.host.process import commands
from tests.support.drivers.block_driver import MIB, Bench, block, mount
from tests.support.faults import killed_groups
from tests.support.raised import raised
from tests.support.records import pool_layout

pytestmark = [pytest.mark.root, pytest.mark.timeout(240), pytest.mark.usefixtures("reap")]

_PIDFD_GETFD = 438  # the same number on every architecture
_SIZES = {"ext4": 64 * MIB, "xfs": 304 * MIB, "btrfs": 128 * MIB}
_TIMEOUT_MS = 60_000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Stops:
    """Makes the driver's tools stop in the middle."""

    directory: Path
    events: int
    """What strace has to say, as a pipe."""

    def stop(self, program: str, *, after_writes: int) -> None:
        """Let strace stop it, with SIGSTOP, right after so many writes."""
        path = commands._ENVIRONMENT["PATH"]
        script = self.directory / program
        inject = f"-e trace=pwrite64 -e inject=pwrite64:signal=SIGSTOP:when={after_writes}"
        # -D: the tool's parent is the driver, as without strace.
        script.write_text(
            f"#!/bin/sh\nPATH={path}\n"
            f'exec strace -D -f -o {self.directory}/events {inject} {program} "$@"\n'
        )
        script.chmod(0o700)
        commands._ENVIRONMENT["PATH"] = f"{self.directory}:{path}"

    def wait(self, program: str) -> int:
        """Until a program of that name below this process has stopped; its process id."""
        said = b""
        while b"--- stopped by SIGSTOP ---" not in said:
            poll = select.poll()
            poll.register(self.events, select.POLLIN)
            assert poll.poll(_TIMEOUT_MS), f"{program} did not stop: {said!r}"
            said += os.read(self.events, 65536)
        return next(pid for pid in _below(os.getpid()) if _name(pid) == program)


@pytest.fixture
def stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stops]:
    """No tool is stopped, unless a test says so."""
    monkeypatch.setitem(commands._ENVIRONMENT, "PATH", commands._ENVIRONMENT["PATH"])
    directory = tmp_path / "bin"
    directory.mkdir()
    os.mkfifo(directory / "events")
    events = os.open(directory / "events", os.O_RDWR | os.O_CLOEXEC)
    yield Stops(directory, events)
    os.close(events)


def _below(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text(encoding="utf-8").split():
                yield int(child)
                yield from _below(int(child))


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    return ""


@dataclass(slots=True)
class Copies:
    """The descriptors of a program that dies, one after the other; those of the lock are the last."""

    devices: list[int]
    locks: list[int]

    @classmethod
    def of(cls, pidfd: int, pid: int) -> "Copies":
        """Copies of what the program has inherited from the driver: the device, and twice the lock."""
        devices, locks = [], []
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = os.readlink(f"/proc/{pid}/fd/{name}")
            if re.fullmatch(r"/dev/(loop\d+|volume)", path):
                devices.append(_copy(pidfd, int(name)))
            elif path.endswith("/tools.lock"):
                locks.append(_copy(pidfd, int(name)))
        assert devices, "the program has not inherited the device"
        assert len(locks) == 1, "the program has not inherited the lock"
        return cls(devices, [*locks, os.dup(locks[0])])

    def close_one(self) -> bool:
        """Close the next; whether one is left."""
        os.close((self.devices or self.locks).pop())
        return bool(self.locks)

    def close(self) -> None:
        while self.locks:
            self.close_one()


def _copy(pidfd: int, descriptor: int) -> int:
    copy = int(_libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0))
    assert copy >= 0, os.strerror(ctypes.get_errno())
    return copy


@pytest.mark.parametrize("group", killed_groups.GROUPS)
@pytest.mark.parametrize("fs_type", _SIZES)
def test_volume_whose_mkfs_was_killed_with_its_group_is_busy_until_the_last_copy_of_the_lock_is_closed(
    bench: Bench, stops: Stops, reap: Callable[[], None], tmp_path: Path, group: str, fs_type: str
) -> None:
    capability = mount(fs_type)
    asyncio.run(_know_mkfs(bench, fs_type))
    volume_id = asyncio.run(bench.create("v", capability, size=_SIZES[fs_type])).volume_id
    image = str(pool_layout.image(bench.root / "state", volume_id))
    stops.stop(f"mkfs.{fs_type}", after_writes=8)

    def life() -> None:
        asyncio.run(bench.stage(volume_id, capability))

    with (
        killed_groups.GROUPS[group](life, tmp_path) as (driver, kill),
        _killed(driver, kill, stops, f"mkfs.{fs_type}") as copies,
    ):
        reap()
        _refused_until_closed(bench, volume_id, copies, fs_type)
    # mkfs has a session of its own: the end of a process group leaves it running, and it ends.
    made = superblocks.read(image, fs_type).uuid if group == "process group" else ""
    asyncio.run(_use(bench, volume_id, fs_type, "new"))
    assert made in ("", superblocks.read(image, fs_type).uuid), (
        "a complete filesystem was made again"
    )


@pytest.mark.parametrize("group", killed_groups.GROUPS)
def test_volume_whose_e2fsck_was_killed_with_its_group_is_busy_until_the_last_copy_of_the_lock_is_closed(
    bench: Bench, stops: Stops, reap: Callable[[], None], tmp_path: Path, group: str
) -> None:
    volume_id = asyncio.run(bench.create("v")).volume_id
    asyncio.run(_use(bench, volume_id, "ext4", "before"))
    image = str(pool_layout.image(bench.root / "state", volume_id))
    made = superblocks.read(image, "ext4").uuid
    unclean = ["debugfs", "-w", "-R", "set_super_value state 0", image]
    subprocess.run(unclean, check=True, capture_output=True)
    stops.stop("prlimit", after_writes=1)  # which confines e2fsck

    def life() -> None:
        asyncio.run(bench.stage(volume_id))

    with (
        killed_groups.GROUPS[group](life, tmp_path) as (driver, kill),
        _killed(driver, kill, stops, "e2fsck") as copies,
    ):
        reap()
        _refused_until_closed(bench, volume_id, copies, "ext4")
    asyncio.run(_use(bench, volume_id, "ext4", "before", "after"))
    assert superblocks.read(image, "ext4").uuid == made


async def _know_mkfs(bench: Bench, fs_type: str) -> None:
    """Stage another volume, so that the driver knows mkfs's options, and its next mkfs is the one of a volume."""
    other = await bench.create("other", mount(fs_type), size=_SIZES[fs_type])
    await bench.stage(other.volume_id, mount(fs_type))
    await bench.unstage(other.volume_id)


@contextmanager
def _killed(driver: int, kill: Callable[[], None], stops: Stops, program: str) -> Iterator[Copies]:
    """Kill the group when the program has stopped; yields what is left of the program, which goes on if it lives."""
    tool = stops.wait(program)
    lives, dies = os.pidfd_open(driver), os.pidfd_open(tool)
    with closing(Copies.of(dies, tool)) as copies:
        kill()
        killed_groups.wait_for_death(lives)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(dies, signal.SIGCONT)
        killed_groups.wait_for_death(dies)
        yield copies


def _refused_until_closed(bench: Bench, volume_id: str, copies: Copies, fs_type: str) -> None:
    commands._ENVIRONMENT["PATH"] = commands._ENVIRONMENT["PATH"].partition(":")[2]
    image = str(pool_layout.image(bench.root / "state", volume_id))
    bench.restart()
    while True:
        for wanted in (mount(fs_type), block()):
            with raised("VolumeInUseByTool"):
                asyncio.run(bench.stage(volume_id, wanted))
        asyncio.run(bench.driver.collect_garbage())
        if copies.devices:
            assert len(loop.find(image)) == 1, "the device's name may be another volume's now"
        if not copies.close_one():
            return


async def _use(bench: Bench, volume_id: str, fs_type: str, *names: str) -> None:
    """Stage and publish, find the files of before, write the last one, and take it all down."""
    await bench.stage(volume_id, mount(fs_type))
    await bench.publish(volume_id, bench.target("v"), mount(fs_type))
    *before, new = (Path(bench.target("v"), name) for name in names)
    assert [path.read_text() for path in before] == [path.name for path in before]
    new.write_text(new.name)
    await bench.unpublish(volume_id, bench.target("v"))
    await bench.unstage(volume_id)
