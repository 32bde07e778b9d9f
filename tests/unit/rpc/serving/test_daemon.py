"""A successor waits for its predecessor."""

import asyncio
import os

import pytest

from crust.core.operations import KeyedOperations
from crust.host.files import locks
from crust.host.process.workers import Workers
from crust.rpc.serving import daemon, server
from tests.support.echo_service import echo, echo_service


async def test_successor_serves_after_last_operation_of_its_predecessor(
    short: str, caplog: pytest.LogCaptureFixture
) -> None:
    lock, path = f"{short}/lock", f"{short}/a.sock"
    ends, began, ended = asyncio.Event(), asyncio.Event(), []
    operations = KeyedOperations(Workers("the test"))

    async def write() -> None:
        began.set()
        await ends.wait()
        ended.append("the operation")

    async def predecessor() -> None:
        async with daemon.starting(lock):
            async with server.serving(path, echo_service()):
                caller = asyncio.create_task(operations.run("volume", "write", None, write))
                await began.wait()
            await operations.drain()
            await caller

    first = asyncio.create_task(predecessor())
    await began.wait()

    async def successor() -> None:
        async with daemon.starting(lock), server.serving(path, echo_service()):
            ended.append("the start")
            assert await echo(path) == b"hello"

    second = asyncio.create_task(successor())
    async with asyncio.timeout(60):
        while "waits for another process to end" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        ends.set()
        await asyncio.gather(first, second)
    assert ended == ["the operation", "the start"]


async def test_successor_ends_and_names_a_holder_that_does_not(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "LOCK_WAIT_S", 0)
    async with daemon.starting(f"{short}/lock") as first, first.serves():
        with pytest.raises(locks.LockHeld, match=f"process {os.getpid()} holds it"):
            async with daemon.starting(f"{short}/lock"):
                raise AssertionError("two processes")
        first.check_ready()
