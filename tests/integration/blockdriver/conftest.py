"""A block driver per test."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from crust.host.block import loop, loop_devices
from crust.host.mounts import mount_api, mountinfo
from tests.support import leaks
from tests.support.drivers.block_driver import Bench
from tests.support.drivers.pools import bench_on

_PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A driver on a directory of its own; what a failed test left attached or mounted is removed."""
    made = Bench(tmp_path)
    yield made
    for mount in sorted(mountinfo.below(str(tmp_path)), key=lambda each: -len(each.target)):
        mount_api.unmount(mount.target)
    for device in loop_devices.list_all():
        if device.backing.startswith(f"{tmp_path}/"):
            loop.detach(device)


@pytest.fixture(params=["ext4", "xfs", "btrfs"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with bench_on(request.param, tmp_path) as bench:
        yield bench


@pytest.fixture(params=["xfs", "btrfs"])
def cloning(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with bench_on(request.param, tmp_path) as bench:
        yield bench


@pytest.fixture
def copying(tmp_path: Path) -> Iterator[Bench]:
    with bench_on("ext4", tmp_path) as bench:
        yield bench


@pytest.fixture
def reap() -> Iterator[Callable[[], None]]:
    """Waits for the programs that a killed driver left, which become our children; kills those of a failed test.

    Not for those who were here before: they may be anybody's, and have no end.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = frozenset(leaks.children())

    def wait(*, kill: bool = False) -> None:
        while orphans := frozenset(leaks.children()) - before:
            for pid in orphans:
                with suppress(ProcessLookupError, ChildProcessError):
                    if kill:
                        os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield wait
    wait(kill=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
