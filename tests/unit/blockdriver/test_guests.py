"""The driver's client of guests, real and fake."""

import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from crust.blockdriver import guests
from crust.core import errors, volumes
from tests.support.raised import raised
from tests.support.runtimes import fake_guests
from tests.support.runtimes.fake_guests import FakeGuests

TARGET = volumes.TargetPath("/var/lib/kubelet/pods/one/mount")
LIMITS = volumes.IoLimits(read_iops=10, write_iops=20, write_bytes_per_second=2**40)


@dataclass
class Way:
    """A way to guests, and the guests at its end."""

    guests: guests.Guests
    end: FakeGuests


def calls(reached: guests.Guests) -> tuple[Coroutine[Any, Any, object], ...]:
    """Each call of a guest."""
    return (reached.freeze(TARGET, 30), reached.thaw(TARGET), reached.set_limits(TARGET, LIMITS))


@pytest.fixture(params=["fake", "socket"])
async def way(request: pytest.FixtureRequest) -> AsyncIterator[Way]:
    end = FakeGuests()
    if request.param == "fake":
        yield Way(end, end)
        return
    async with AsyncExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="crust-"))
        socket = f"{root}/runtime.sock"
        await stack.enter_async_context(fake_guests.serving(end, socket))
        reached = guests.Guests(socket)
        stack.push_async_callback(reached.close)
        yield Way(reached, end)


async def test_guests_freeze_lasts_until_thaw_or_the_watchdog(way: Way) -> None:
    guest = way.end.add(TARGET.text)
    assert await way.guests.freeze(TARGET, 30)
    assert (guest.frozen, guest.thaw_after_s) == (True, 30)
    assert await way.guests.thaw(TARGET)
    assert not guest.frozen
    assert await way.guests.freeze(TARGET, 1)
    guest.watchdog()
    assert not await way.guests.thaw(TARGET)


async def test_guests_without_a_sandbox_freeze_nothing_and_defer_limits(way: Way) -> None:
    guest = way.end.add(TARGET.text, running=False)
    assert not await way.guests.freeze(TARGET, 30)
    assert not await way.guests.set_limits(TARGET, LIMITS)
    assert guest.limits == LIMITS
    assert guest.applied is None


async def test_guests_limits_arrive_unchanged(way: Way) -> None:
    guest = way.end.add(TARGET.text)
    assert await way.guests.set_limits(TARGET, LIMITS)
    assert guest.applied == LIMITS
    assert await way.guests.set_limits(TARGET, volumes.IoLimits())
    assert guest.applied == volumes.IoLimits()


async def test_guests_call_for_a_target_not_deferred_is_not_found(way: Way) -> None:
    for call in calls(way.guests):
        with pytest.raises(errors.NotFound):
            await call


@pytest.mark.parametrize("kind", [errors.NotReady, errors.PeerUnavailable, errors.OperationPending])
async def test_guests_refusal_keeps_branch_and_why(way: Way, kind: type[errors.CrustError]) -> None:
    way.end.add(TARGET.text).error = kind("the handler cannot do that", hint="use another")
    for call in calls(way.guests):
        with pytest.raises(kind, match="the handler cannot do that; use another"):
            await call


async def test_guests_freeze_without_a_timeout_is_refused(way: Way) -> None:
    way.end.add(TARGET.text)
    with pytest.raises(errors.InvalidRequest):
        await way.guests.freeze(TARGET, 0)


async def test_guests_with_an_absent_proxy_are_unavailable_until_it_returns() -> None:
    end = FakeGuests()
    guest = end.add(TARGET.text)
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        reached = guests.Guests(f"{root}/runtime.sock")
        with pytest.raises(errors.PeerUnavailable):
            await reached.freeze(TARGET, 30)
        async with fake_guests.serving(end, f"{root}/runtime.sock"):
            while not guest.frozen:  # gRPC may wait a moment before it looks again
                try:
                    await reached.freeze(TARGET, 30)
                except errors.PeerUnavailable:
                    continue
        await reached.close()


async def test_guests_without_a_socket_refuse_with_the_remedy() -> None:
    unset = guests.Guests()
    for call in calls(unset):
        with pytest.raises(errors.NotReady, match="runtime_socket"):
            await call
    with pytest.raises(errors.NotReady, match="runtime_socket"):
        unset.check_reachable()
    await unset.close()


def test_guests_with_an_invalid_socket_path_fail_at_start() -> None:
    with raised("SocketPathTooLong"):
        guests.Guests("/" + "x" * 107)
