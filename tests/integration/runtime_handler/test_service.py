"""crust.runtime_handler.service, called by the proxy's own client over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from crust.core import errors, volumes
from crust.proxy import handler_calls
from crust.proxy.handler_calls import HandlerNotResponding
from crust.proxy.handlers import RegisteredHandler
from crust.rpc.port import SocketPort
from crust.runtime_handler import service
from tests.support.drivers.fake_driver import Gate
from tests.support.records.records import TARGET
from tests.support.runtimes.fake_handler import FakeHandler

GIB = 1 << 30
RANGE = volumes.CapacityRange(GIB)


class WithoutLimits(FakeHandler):
    """Grows and freezes its volume when it is allowed to, and lacks a feature."""

    def __init__(self) -> None:
        super().__init__()
        self.growing = self.gates["expand", TARGET.text] = Gate()
        self.freezing = self.gates["freeze", TARGET.text] = Gate()

    async def set_limits(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> None:
        raise service.FeatureNotOffered(volumes.HandlerFeature.IO_LIMITS)


@pytest.fixture
async def runtime() -> WithoutLimits:
    return WithoutLimits()


def _handler(path: str, port: SocketPort) -> RegisteredHandler:
    name = volumes.HandlerName("kata")
    return RegisteredHandler(name, "1", path, frozenset({"ext4"}), port=port)


@pytest.fixture
async def handler(run_dir: str, runtime: WithoutLimits) -> AsyncIterator[RegisteredHandler]:
    """The served runtime, as the proxy's registry knows it."""
    path = f"{run_dir}/handler.sock"
    async with service.serving(path, runtime), SocketPort(path) as port:
        yield _handler(path, port)
        runtime.growing.opened.set()
        runtime.freezing.opened.set()


async def given_up(call: Callable[[], Awaitable[object]], gate: Gate) -> None:
    """Call with a short deadline, until one of the calls has reached the runtime before its deadline came."""
    while not gate.entered.is_set():
        with pytest.raises(HandlerNotResponding):
            await call()


async def test_end_of_session_leaves_calls_of_another_on_its_endpoint(
    handler: RegisteredHandler, runtime: WithoutLimits
) -> None:
    other = _handler(handler.endpoint, SocketPort(handler.endpoint))
    await handler_calls.stats(other, TARGET, None)
    grows = asyncio.create_task(
        handler_calls.expand(handler, TARGET, volumes.CapacityRange(2 * GIB), None)
    )
    await runtime.growing.entered.wait()
    await other.port.aclose()
    runtime.growing.opened.set()
    assert await grows == 2 * GIB


async def test_the_runtimes_errors_keep_their_branch_and_sentence(
    handler: RegisteredHandler, runtime: WithoutLimits
) -> None:
    runtime.error = errors.NotReady("no sandbox has the volume", hint="start the pod")
    with pytest.raises(errors.NotReady, match="no sandbox has the volume; start the pod"):
        await handler_calls.stats(handler, TARGET, None)
    with pytest.raises(errors.InvalidRequest, match="relative"):
        await handler_calls.stats(handler, volumes.TargetPath("not/absolute"), None)


async def test_an_empty_range_is_refused_before_the_runtime_sees_it(
    handler: RegisteredHandler, runtime: WithoutLimits
) -> None:
    with pytest.raises(errors.OutOfRange):
        await handler_calls.expand(handler, TARGET, volumes.CapacityRange(2, 1), None)
    assert runtime.called == []


async def test_expansion_survives_its_callers_deadline_and_retry_joins_it(
    handler: RegisteredHandler, runtime: WithoutLimits
) -> None:
    await given_up(lambda: handler_calls.expand(handler, TARGET, RANGE, 0.05), runtime.growing)
    with pytest.raises(errors.OperationPending):
        await handler_calls.expand(handler, TARGET, volumes.CapacityRange(2 * GIB), None)
    with pytest.raises(HandlerNotResponding):
        await handler_calls.expand(handler, TARGET, RANGE, 0.05)
    assert runtime.called == ["expand"]
    runtime.growing.opened.set()
    assert await handler_calls.expand(handler, TARGET, RANGE, None) == GIB


async def test_stopping_waits_for_a_running_expansion(run_dir: str, runtime: WithoutLimits) -> None:
    path = f"{run_dir}/other.sock"
    wanted = volumes.CapacityRange(3 * GIB)
    async with AsyncExitStack() as stack:
        served = _handler(path, await stack.enter_async_context(SocketPort(path)))
        await stack.enter_async_context(service.serving(path, runtime))
        await given_up(lambda: handler_calls.expand(served, TARGET, wanted, 0.05), runtime.growing)
        leaving = asyncio.create_task(stack.aclose())
        await asyncio.sleep(0)  # it begins
        with pytest.raises(errors.PeerUnavailable, match="this process is stopping"):
            await handler_calls.expand(served, TARGET, wanted, None)
        assert not leaving.done()
        runtime.growing.opened.set()
        await leaving
    assert runtime.expansions == [(TARGET.text, wanted)]


async def test_abandoned_freeze_is_finished_before_its_thaw(
    handler: RegisteredHandler, runtime: WithoutLimits
) -> None:
    await given_up(lambda: handler_calls.freeze(handler, TARGET, 10, 0.05), runtime.freezing)
    with pytest.raises(errors.OperationPending):
        await handler_calls.freeze(handler, TARGET, 20, None)
    thawing = asyncio.create_task(handler_calls.thaw(handler, TARGET, None))
    with pytest.raises(HandlerNotResponding):
        await handler_calls.thaw(handler, TARGET, 0.05)
    assert not thawing.done()
    runtime.freezing.opened.set()
    assert await thawing is True
    assert (runtime.called, runtime.frozen) == (["freeze", "thaw"], {})


async def test_expansion_that_waits_in_guest_does_not_block_thaw(
    handler: RegisteredHandler, runtime: WithoutLimits
) -> None:
    runtime.freezing.opened.set()
    await handler_calls.freeze(handler, TARGET, 10, None)
    growing = asyncio.create_task(handler_calls.expand(handler, TARGET, RANGE, None))
    await runtime.growing.entered.wait()
    assert await handler_calls.thaw(handler, TARGET, None) is True
    assert await handler_calls.thaw(handler, TARGET, None) is False
    runtime.growing.opened.set()
    assert await growing == GIB


async def test_freeze_of_one_volume_does_not_wait_for_another(
    handler: RegisteredHandler, runtime: WithoutLimits
) -> None:
    other = volumes.TargetPath("/other")
    await given_up(lambda: handler_calls.freeze(handler, TARGET, 10, 0.05), runtime.freezing)
    await handler_calls.freeze(handler, other, 10, None)
    assert await handler_calls.thaw(handler, other, None) is True
    runtime.freezing.opened.set()


@pytest.mark.parametrize("seconds", [0, 61])
async def test_invalid_freeze_time_is_refused_before_the_runtime_is_called(
    handler: RegisteredHandler, runtime: WithoutLimits, seconds: int
) -> None:
    with pytest.raises(errors.InvalidRequest, match="from 1 to 60"):
        await handler_calls.freeze(handler, TARGET, seconds, None)
    assert runtime.called == []


async def test_feature_that_a_runtime_does_not_offer_is_unsupported(
    handler: RegisteredHandler,
) -> None:
    with pytest.raises(errors.Unsupported, match="IO_LIMITS"):
        await handler_calls.set_limits(handler, TARGET, volumes.IoLimits(read_iops=1))
    with pytest.raises(errors.InvalidRequest, match="read_iops is -1"):
        await handler_calls.set_limits(handler, TARGET, volumes.IoLimits(read_iops=-1))
