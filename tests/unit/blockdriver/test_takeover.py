"""`crust driver` is taken over by the next process of the same driver, and by no other one."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crust.blockdriver import serve
from crust.rpc.serving.daemon import Daemon
from crust.rpc.serving.takeover import TakeoverRefused
from crust.settings import loading
from crust.settings.driver import DriverSettings


@pytest.fixture
def base() -> Iterator[Path]:
    """A short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="crust-", dir="/tmp") as name:
        yield Path(name)


@asynccontextmanager
async def process(base: Path, name: str, number: int) -> AsyncIterator[Daemon]:
    """A driver of that name which waits for its pool, and takes over the one that is there."""
    sockets = base / f"csi-{number}"
    sockets.mkdir(mode=0o700)
    flags = {
        "driver_name": name,
        "socket": f"{sockets}/csi.sock",
        "node_id": "n1",
        "run_dir": f"{base}/run",
        "state_dir": f"{base}/pool",
        "pool_id_file": f"{base}/pool-id",
    }
    settings = loading.load(DriverSettings, "driver", environ={}, flags=flags)
    async with serve.running(
        serve.driver_of(settings),
        socket=settings.socket,
        run_dir=settings.run_dir,
        take_over=True,
    ) as daemon:
        yield daemon


async def test_driver_refuses_to_be_taken_over_by_a_process_of_another_driver(base: Path) -> None:
    async with process(base, "a.example.com", 1) as first:
        with pytest.raises(TakeoverRefused, match=r"it runs the driver a\.example\.com"):
            async with process(base, "b.example.com", 2):
                pytest.fail("it took over the other driver's state")
        assert not first.taken_over
        async with process(base, "a.example.com", 3):
            assert first.taken_over
