"""One process takes over another's state while clients call: no client gets an error, and two never write at once."""

import asyncio
import contextlib
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest

from crust import operations
from crust.host.files import flocks
from crust.operations import KeyedOperations
from crust.rpc import channel
from crust.rpc.serving import daemon, server, takeover
from crust.rpc.serving import gate as gates
from crust.rpc.serving.daemon import Daemon
from crust.rpc.serving.gate import Gate
from tests.support.nodes.takeovers import CALL, Call, Clients, begun, start


async def test_clients_see_no_error_while_a_process_is_taken_over_again_and_again(
    short: str,
) -> None:
    running = [await start(short, b"0")]
    clients = Clients(f"{short}/a.sock")
    async with clients.calling():
        for number in range(1, 6):
            await clients.until(running[-1].service.name, 10)
            running.append(await start(short, b"%d" % number, take_over=True))
        await clients.until(b"5", 20)
    for process in running:
        await process.stop()


async def test_a_running_call_ends_at_the_predecessor_and_later_ones_wait_for_the_successor(
    short: str,
) -> None:
    old = await start(short, b"old")
    async with channel.connect(f"{short}/a.sock") as connected:
        call: Call = connected.unary_unary(CALL)
        slow = await begun(call, old)
        starts = asyncio.create_task(start(short, b"new", take_over=True))
        await old.gate.closed.wait()
        waits = asyncio.ensure_future(call(b"", timeout=60))
        done, _ = await asyncio.wait([waits, slow], timeout=0.05)
        assert not done
        assert old.service.may_write
        old.service.slow_ends.set()
        assert await slow == b"old"
        assert await waits == b"new"
        assert not old.service.may_write
        new = await starts
    await old.stop()
    await new.stop()


async def test_a_predecessor_whose_call_does_not_end_refuses_and_goes_on(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "DRAIN_S", 0.05)
    old = await start(short, b"old")
    async with channel.connect(f"{short}/a.sock") as connected:
        call: Call = connected.unary_unary(CALL)
        slow = await begun(call, old)
        with pytest.raises(takeover.TakeoverRefused, match="have not ended within"):
            await start(short, b"new", take_over=True)
        assert await call(b"", timeout=60) == b"old"
        old.service.slow_ends.set()
        assert await slow == b"old"
    await old.stop()


async def test_calls_that_waited_for_a_refused_takeover_are_answered_and_the_next_one_succeeds(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "DRAIN_S", 1.0)
    old = await start(short, b"old")
    async with channel.connect(f"{short}/a.sock") as connected:
        call: Call = connected.unary_unary(CALL)
        slow = await begun(call, old)
        starts = asyncio.create_task(start(short, b"new", take_over=True))
        await old.gate.closed.wait()
        waits = [asyncio.ensure_future(call(b"", timeout=60)) for _ in range(3)]
        with pytest.raises(takeover.TakeoverRefused, match="have not ended within"):
            await starts
        assert await asyncio.gather(*waits) == [b"old"] * 3
        old.service.slow_ends.set()
        assert await slow == b"old"
        new = await start(short, b"new", take_over=True)
        assert await call(b"", timeout=60) == b"new"
    await old.stop()
    await new.stop()


class Unending(KeyedOperations):
    """An operation that has not ended when the time for it is over, which the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.time_is_over = asyncio.Event()

    def running(self) -> int:
        return int(not self.time_is_over.is_set())

    async def idle(self) -> None:
        if not self.time_is_over.is_set():
            await self.time_is_over.wait()
            raise TimeoutError


async def test_server_that_appears_during_a_refused_takeover_serves_afterwards(short: str) -> None:
    """A driver's drop-in file, say: its socket is closed with the others, and opened with them."""
    old, unending = await start(short, b"old"), Unending()
    old.daemon.before_release(lambda: [unending])
    starts = asyncio.create_task(start(short, b"new", take_over=True))
    await old.gate.closed.wait()
    late = server.serving(
        f"{short}/b.sock", name="b", generic=[old.service], daemon=old.daemon, gate=Gate()
    )
    async with late, channel.connect(f"{short}/b.sock") as to_late:
        late_call: Call = to_late.unary_unary(CALL)
        waits = asyncio.ensure_future(late_call(b"", timeout=60))
        await asyncio.wait([waits], timeout=0.05)
        assert not waits.done()
        unending.time_is_over.set()
        with pytest.raises(takeover.TakeoverRefused, match="have not ended within"):
            await starts
        assert await waits == b"old"
    await old.stop()


async def test_a_predecessor_ends_with_an_error_if_its_successor_dies_before_it_serves(
    short: str,
) -> None:
    """It cannot know what the successor has written, and must not write on what it remembers."""
    old = await start(short, b"old")
    predecessor = await takeover.ask(f"{short}/lock.takeover")
    flocks.ProcessLock.acquire(f"{short}/lock").close()  # free before it was reported
    predecessor.close()
    with pytest.raises(takeover.SuccessorLost):
        async with asyncio.timeout(60):
            await old.daemon.forever()
    assert not old.service.may_write
    await old.stop()


async def test_a_successor_starts_as_after_a_kill_if_its_predecessor_dies_meanwhile(
    short: str,
) -> None:
    lock = flocks.ProcessLock.acquire(f"{short}/lock")

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        lock.close()
        writer.close()

    listening = await asyncio.start_unix_server(die, f"{short}/lock.takeover")
    new = await start(short, b"new", take_over=True)
    listening.close()
    async with channel.connect(f"{short}/a.sock") as connected:
        call: Call = connected.unary_unary(CALL)
        assert await call(b"", timeout=60) == b"new"
    await new.stop()


async def test_a_second_process_is_refused_without_take_over(short: str) -> None:
    old = await start(short, b"old")
    with pytest.raises(flocks.LockHeld):
        await start(short, b"new")
    await old.stop()


async def test_a_holder_that_cannot_be_asked_is_not_taken_over(short: str) -> None:
    """An older version, say."""
    lock = flocks.ProcessLock.acquire(f"{short}/lock")
    with pytest.raises(takeover.TakeoverRefused, match="does not answer"):
        await start(short, b"new", take_over=True)
    lock.close()
    new = await start(short, b"new", take_over=True)
    await new.stop()


async def test_a_second_successor_is_refused_while_the_first_one_takes_over(short: str) -> None:
    old = await start(short, b"old")
    first = await takeover.ask(f"{short}/lock.takeover")
    with pytest.raises(takeover.TakeoverRefused, match="already"):
        await takeover.ask(f"{short}/lock.takeover")
    await first.report_serving()
    await old.stop()


async def test_callers_see_no_error_when_the_predecessor_ends_under_them(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 connections with four callers each, which call without a pause, and ask what a gate does not hold too.

    On a busy machine it takes longer than the gate's own times until all of them wait for an answer.
    """
    monkeypatch.setattr(gates, "QUIET_S", 2.0)
    monkeypatch.setattr(gates, "HOLD_S", 60.0)
    old = await start(short, b"old")
    clients = Clients(f"{short}/a.sock")

    async def calls(connected: grpc.aio.Channel, method: str) -> None:
        call: Call = connected.unary_unary(method)
        while True:
            clients.add(await call(b"", timeout=60))

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []
        for number in range(20):
            connected = await stack.enter_async_context(channel.connect(clients.path))
            method = CALL if number % 4 else "/csi.v1.Node/NodeGetCapabilities"
            tasks += [group.create_task(calls(connected, method)) for _ in range(4)]
        await clients.until(b"old", 100)
        new = await start(short, b"new", take_over=True)
        await clients.until(b"new", 100)
        await old.stop()
        await clients.until(b"new", 100)
        for task in tasks:
            task.cancel()
    await new.stop()


async def test_forwarded_call_is_answered_after_the_predecessor_began_to_stop(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE_S", 0)
    old = await start(short, b"old")
    async with channel.connect(f"{short}/a.sock") as connected:
        call: Call = connected.unary_unary(CALL)
        assert await call(b"", timeout=60) == b"old"
        new = await start(short, b"new", take_over=True)
        slow = await begun(call, new)
        ends = asyncio.create_task(old.stop())
        done, _ = await asyncio.wait([slow, ends], timeout=0.2)
        assert not done
        new.service.slow_ends.set()
        assert await slow == b"new"
        await ends
    await new.stop()


@pytest.mark.parametrize("inner_first", [True, False])
async def test_an_operation_that_one_part_begins_in_another_ends_before_the_state_is_released(
    short: str, *, inner_first: bool
) -> None:
    """Within one process there is no gate between the parts, and each caller has left before its operation ends."""
    old = await start(short, b"old")
    inner, outer = KeyedOperations(), KeyedOperations()
    for each in (inner, outer) if inner_first else (outer, inner):
        old.daemon.before_release(lambda each=each: [each])  # type: ignore[misc]
    begins, began, ends = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def write() -> None:
        began.set()
        await ends.wait()

    async def call_inner() -> None:
        await begins.wait()
        with contextlib.suppress(operations.OperationOverdue):
            await inner.run("volume", "inner", b"", write, left_s=0.01)

    with pytest.raises(operations.OperationOverdue):
        await outer.run("volume", "outer", b"", call_inner, left_s=0.01)
    starts = asyncio.create_task(start(short, b"new", take_over=True))
    await old.gate.closed.wait()
    begins.set()
    await began.wait()
    await outer.idle()
    done, _ = await asyncio.wait([starts], timeout=0.1)
    may_write = old.service.may_write
    ends.set()
    new = await starts
    refused = await asyncio.gather(
        *(each.run("volume", "late", b"", call_inner) for each in (inner, outer)),
        return_exceptions=True,
    )
    await old.stop()
    await new.stop()
    assert not done
    assert may_write
    assert [type(each) for each in refused] == [operations.ShuttingDown] * 2


async def test_an_operation_that_begins_while_the_parts_are_closed_ends_before_the_lock_is_free(
    short: str,
) -> None:
    """What a store has delivered when all was idle, as a cluster's agent gets its requests."""
    old = await start(short, b"old")
    own = KeyedOperations()
    old.daemon.before_release(lambda: [own])
    began, ends = asyncio.Event(), asyncio.Event()

    async def write() -> None:
        began.set()
        await ends.wait()

    async def deliver() -> None:
        with contextlib.suppress(operations.OperationOverdue):
            await own.run("volume", "delivered", b"", write, left_s=0.01)

    old.daemon.owned.push_async_callback(deliver)
    starts = asyncio.create_task(start(short, b"new", take_over=True))
    await began.wait()
    done, _ = await asyncio.wait([starts], timeout=0.1)
    ends.set()
    new = await starts
    await old.stop()
    await new.stop()
    assert not done


@pytest.mark.parametrize("of", ["b.example.com", "a.example.com", ""])
async def test_process_of_another_driver_is_refused_and_changes_nothing(
    short: str, of: str
) -> None:
    """Two processes that have one directory by mistake would take over from each other again and again."""
    lock = f"{short}/lock"
    async with daemon.starting(lock, of="a.example.com") as old, old.serves():
        if of != "b.example.com":
            async with daemon.starting(lock, take_over=True, of=of) as new, new.serves():
                await _taken_over(old)
            return
        with pytest.raises(takeover.TakeoverRefused, match=r"runs the driver a\.example\.com"):
            async with daemon.starting(lock, take_over=True, of=of):
                raise AssertionError("it took over")
        assert not old.taken_over
        old.check_ready()


async def _taken_over(old: Daemon) -> None:
    """Wait until the predecessor knows it."""
    done = asyncio.Event()
    old.after_takeover(done.set)
    if not old.taken_over:
        async with asyncio.timeout(60):
            await done.wait()
