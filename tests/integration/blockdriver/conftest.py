"""A block driver per test."""

import ctypes
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import leaks
from tests.support.drivers import remnants
from tests.support.drivers.block_driver import Bench
from tests.support.drivers.pools import bench_on

_PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A driver on a directory of its own; a volume that a test leaves staged or published is ended by the driver."""
    made = Bench(tmp_path)
    try:
        yield made
        await made.take_down()
    finally:
        remnants.remove(tmp_path)


def benches_on(*fs_types: str, **of: Any) -> Callable[..., AsyncIterator[Bench]]:
    """A fixture: a driver whose pool is on each of these filesystems in turn; `of` has what else `bench_on` takes."""

    @pytest.fixture(params=fs_types)
    async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
        with bench_on(request.param, tmp_path, **of) as made:
            yield made
            await made.take_down()

    return bench


pool = benches_on("ext4", "xfs", "btrfs")
cloning = benches_on("xfs", "btrfs")
copying = benches_on("ext4")


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
