"""Probe reports in time whether the driver can serve, whatever its volumes do."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from crust.blockdriver.services import identity
from crust.blockdriver.services.identity import Identity
from crust.core import errors
from crust.core.operations import KeyedOperations
from crust.host.process import workers
from crust.host.process.workers import NoWorkerFree, Workers
from crust.rpc.call import Call
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import caller
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.raised import raised


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy is no pool that hangs."""
    monkeypatch.setattr(identity, "_PROBE_TIMEOUT_S", 30)


class Checked(MemoryBackend):
    """A backend with a check of one's own."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def check(self) -> None:
        self._check()


def running() -> KeyedOperations:
    return KeyedOperations(Workers("the driver"))


async def probe(served: Identity) -> bool:
    return (await served.Probe(csi_pb2.ProbeRequest(), caller())).ready.value


async def test_probe_while_every_worker_hangs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dead, threads = threading.Event(), Workers("the driver", limit=2)
    served = Identity("driver", MemoryBackend(), "1.12", KeyedOperations(threads))
    hung = [asyncio.create_task(threads.run(dead.wait)) for _ in range(2)]
    await asyncio.sleep(0)  # they have both threads, or are first in the queue
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
    with pytest.raises(NoWorkerFree, match=r"none of its 2 threads .* kernel log"):
        await probe(served)
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
    dead.set()
    await asyncio.gather(*hung)
    assert await probe(served)


async def test_probe_of_a_hung_pool_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_PROBE_TIMEOUT_S", 0.01)
    dead = threading.Event()
    served = Identity("driver", Checked(lambda: discard(dead.wait())), "1.12", running())
    for _ in range(2):
        with raised("PoolNotResponding"):
            await probe(served)
    dead.set()
    monkeypatch.setattr(identity, "_PROBE_TIMEOUT_S", 30)
    assert await probe(served)


async def test_probe_of_a_missing_pool_reports_the_reason() -> None:
    def refuse() -> None:
        raise errors.NotReady("no loop driver")

    with pytest.raises(errors.NotReady, match="no loop driver"):
        await probe(Identity("driver", Checked(refuse), "1.12", running()))


def discard(_: object) -> None:
    return None


@pytest.mark.parametrize("stays", [True, False])
async def test_probe_of_a_pool_that_goes_away_is_not_ready(*, stays: bool) -> None:
    is_there = True

    def gone() -> None:
        nonlocal is_there
        is_there = stays
        raise errors.PeerUnavailable("the directory is not open")

    served = Identity("driver", Checked(gone), "1.12", running(), is_ready=lambda: is_there)
    if stays:
        with pytest.raises(errors.PeerUnavailable):
            await probe(served)
    else:
        assert not await probe(served)


@pytest.mark.parametrize("asks", [True, False])
async def test_probe_of_an_absent_pool_gives_the_reason(*, asks: bool) -> None:
    def absent() -> None:
        raise errors.PeerUnavailable.named("PoolAbsent", "the disk is not mounted")

    served = Identity("driver", Checked(absent), "1.12", running(), is_ready=lambda: False)
    metadata = ((extensions.KEY, extensions.ERROR_INFO),) * asks
    call = Call("/csi.v1.Identity/Probe", metadata)
    assert not (await served.Probe(csi_pb2.ProbeRequest(), call)).ready.value
    wanted = ((extensions.NOT_READY, b"[PoolAbsent] the disk is not mounted"),)
    assert call.trailing == (wanted if asks else ())
