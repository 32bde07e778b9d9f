"""Probe reports in time whether the driver can serve, whatever its volumes do."""

import threading
from collections.abc import Callable

import pytest

from crust.blockdriver.services import identity
from crust.blockdriver.services.identity import Identity
from crust.blockdriver.services.roles import Role
from crust.core import errors
from crust.core.operations import KeyedOperations
from crust.host.process.workers import Workers
from crust.rpc.call import Call
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import caller
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.raised import raised


class Checked(MemoryBackend):
    """A backend with a check of one's own."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def check_usable(self) -> None:
        self._check()


def identity_of(check: Callable[[], None]) -> Identity:
    return Identity("driver", Checked(check), Role(), KeyedOperations(Workers("the driver")))


async def ready(served: Identity) -> bool:
    return (await served.Probe(csi_pb2.ProbeRequest(), caller())).ready.value


async def test_probe_of_a_hung_pool_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_PROBE_TIMEOUT_S", 0.01)
    dead = threading.Event()
    served = identity_of(lambda: discard(dead.wait()))
    for _ in range(2):
        with raised("PoolNotResponding"):
            await ready(served)
    dead.set()
    monkeypatch.setattr(identity, "_PROBE_TIMEOUT_S", 30)
    assert await ready(served)


async def test_probe_of_a_missing_pool_reports_the_reason() -> None:
    def refuse() -> None:
        raise errors.NotReady("no loop driver")

    with pytest.raises(errors.NotReady, match="no loop driver"):
        await ready(identity_of(refuse))


def discard(_: object) -> None:
    return None


@pytest.mark.parametrize("stays", [True, False])
async def test_probe_of_a_pool_that_goes_away_is_not_ready(*, stays: bool) -> None:
    def gone() -> None:
        error = errors.PeerUnavailable("the directory is not open")
        plugin.problem = None if stays else error
        raise error

    plugin = identity_of(gone)
    if stays:
        with pytest.raises(errors.PeerUnavailable):
            await ready(plugin)
    else:
        assert not await ready(plugin)


@pytest.mark.parametrize("asks", [True, False])
async def test_probe_of_an_absent_pool_gives_the_reason(*, asks: bool) -> None:
    plugin = identity_of(lambda: pytest.fail("an absent pool is not asked"))
    plugin.problem = errors.PeerUnavailable.named("PoolAbsent", "the disk is not mounted")
    metadata = ((extensions.KEY, extensions.ERROR_INFO),) * asks
    call = Call("/csi.v1.Identity/Probe", metadata)
    assert not (await plugin.Probe(csi_pb2.ProbeRequest(), call)).ready.value
    wanted = ((extensions.NOT_READY, plugin.problem.shown().encode()),)
    assert call.trailing == (wanted if asks else ())
