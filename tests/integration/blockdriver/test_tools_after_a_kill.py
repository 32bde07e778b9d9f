"""A program that a killed driver started on a volume runs on: the volume is not staged until it has ended.

The program is stopped, as a disk that hangs would stop it, before it has opened the device: nothing but what it
inherited tells the next driver of it.
"""

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from crust.blockdriver.node import tool_lock
from crust.host.block import loop
from crust.host.process import commands
from tests.support import leaks
from tests.support.block_driver import MIB, Bench, block, mount

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

_PR_SET_CHILD_SUBREAPER = 36
_SIZES = {"ext4": 64 * MIB, "xfs": 304 * MIB, "btrfs": 128 * MIB}


@pytest.fixture
def stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes a program stop itself, by SIGSTOP, before it does anything. What the driver leaves becomes our child."""
    directory = tmp_path / "bin"
    directory.mkdir()
    path = commands._ENVIRONMENT["PATH"]

    def stop(program: str) -> None:
        script = directory / program
        script.write_text(f'#!/bin/sh\nPATH={path}\nkill -STOP $$\nexec {program} "$@"\n')
        script.chmod(0o700)
        monkeypatch.setitem(commands._ENVIRONMENT, "PATH", f"{directory}:{path}")

    libc = ctypes.CDLL(None, use_errno=True)
    before = frozenset(leaks.children())
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield stop
    for pid in frozenset(leaks.children()) - before:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _driver_killed_in(stage: Callable[[], None]) -> int:
    """Run `stage` in a process that is killed as soon as its program has stopped; returns the program's process."""
    driver = os.fork()
    if not driver:
        with suppress(BaseException):
            stage()
        os._exit(1)
    program = _stopped_child_of(driver)
    os.kill(driver, signal.SIGKILL)
    os.waitpid(driver, 0)
    return program


def _stopped_child_of(parent: int) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdigit() and _state_and_parent(name) == ("T", parent):
                    return int(name)
    raise AssertionError("no program was started and stopped")


def _state_and_parent(pid: str) -> tuple[str, int]:
    fields = Path("/proc", pid, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return fields[0], int(fields[1])


@pytest.mark.parametrize("fs_type", list(_SIZES))
def test_stage_while_the_mkfs_of_a_killed_driver_runs_is_refused_until_it_ends(
    bench: Bench, stopping: Callable[[str], None], fs_type: str
) -> None:
    capability = mount(fs_type)
    volume = asyncio.run(bench.create("v", capability, size=_SIZES[fs_type]))
    image = str(bench.root / "state" / "images" / f"{volume.volume_id}.img")
    stopping(f"mkfs.{fs_type}")
    mkfs = _driver_killed_in(lambda: asyncio.run(bench.stage(volume.volume_id, capability)))
    bench.restart()

    for wanted in (capability, block()):
        with pytest.raises(tool_lock.VolumeInUseByTool):
            asyncio.run(bench.stage(volume.volume_id, wanted))
    asyncio.run(bench.driver.collect_garbage())
    assert len(loop.find(image)) == 1, (
        "the device was detached, and its name may be another volume's now"
    )

    os.kill(mkfs, signal.SIGCONT)
    os.waitpid(mkfs, 0)
    commands._ENVIRONMENT["PATH"] = commands._ENVIRONMENT["PATH"].partition(":")[2]
    asyncio.run(bench.stage(volume.volume_id, capability))
    asyncio.run(bench.publish(volume.volume_id, bench.target("v"), capability))
    asyncio.run(bench.unpublish(volume.volume_id, bench.target("v")))
    asyncio.run(bench.unstage(volume.volume_id))


def test_stage_of_another_volume_while_a_tool_runs_succeeds(
    bench: Bench, stopping: Callable[[str], None]
) -> None:
    first = asyncio.run(bench.create("first"))
    second = asyncio.run(bench.create("second", mount("xfs"), size=_SIZES["xfs"]))
    stopping("mkfs.ext4")
    _driver_killed_in(lambda: asyncio.run(bench.stage(first.volume_id)))
    bench.restart()
    asyncio.run(bench.stage(second.volume_id, mount("xfs")))
    asyncio.run(bench.unstage(second.volume_id))
