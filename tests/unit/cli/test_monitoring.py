"""Health over HTTP: what makes it fail."""

import asyncio
import logging
import re
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from crust.cli.programs import monitoring
from crust.core import errors
from crust.rpc.serving.daemon import Daemon, starting
from tests.support.raised import raised


@asynccontextmanager
async def monitored(caplog: pytest.LogCaptureFixture) -> AsyncIterator[str]:
    caplog.set_level(logging.INFO)
    with monitoring.serving("127.0.0.1:0"):
        (line,) = [vars(each) for each in caplog.records if each.msg == "metrics"]
        yield f"http://{line['address']}"


def ask(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def answers(address: str) -> tuple[int, int, str]:
    healthy, _ = await asyncio.to_thread(ask, f"{address}/healthz")
    ready, why = await asyncio.to_thread(ask, f"{address}/readyz")
    return healthy, ready, why


async def test_process_is_ready_while_it_serves_and_its_parts_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away: list[errors.CrustError] = []
    async with monitored(caplog) as address:
        assert (await answers(address))[:2] == (200, 503)
        async with starting(f"{tmp_path}/lock") as daemon:
            daemon.readiness.append(lambda: away[0] if away else None)
            healthy, ready, why = await answers(address)
            assert (healthy, ready) == (200, 503)
            assert "[NotServing] this process does not serve" in why
            async with daemon.serves():
                assert await answers(address) == (200, 200, "ok\n")
                away.append(errors.PeerUnavailable("the driver is away"))
                healthy, ready, why = await answers(address)
                assert (healthy, ready) == (200, 503)
                assert "the driver is away" in why
                away.clear()
                await check_broken(daemon, address)
            assert (await answers(address))[:2] == (200, 503)


async def check_broken(daemon: Daemon, address: str) -> None:
    daemon.health.report("part", errors.RuntimeFailed("broken"))
    assert (await answers(address))[:2] == (503, 503)
    daemon.health.report("part", errors.RuntimeFailed("slow"), is_fatal=False)
    assert (await answers(address))[:2] == (200, 200)
    daemon.health.report("part", None)


async def test_server_connections_held_open_are_bounded_and_probe_is_answered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitoring, "CONNECTIONS", 2)
    async with monitored(caplog) as address:
        host, _, port = address.removeprefix("http://").rpartition(":")
        with ExitStack() as held:
            slow = [
                held.enter_context(socket.create_connection((host, int(port)), timeout=20))
                for _ in range(2)
            ]
            slow[0].sendall(b"GET /healthz HT")
            assert await asyncio.to_thread(ask, f"{address}/healthz") == (200, "ok\n")
            assert await asyncio.to_thread(slow[0].recv, 1) == b""


def test_loop_that_hangs_is_unhealthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitoring, "ANSWER_S", 0.01)
    loop = asyncio.new_event_loop()  # it does not run
    try:
        with raised("LoopHangs", match=re.escape("its event loop has not answered")):
            monitoring._Monitor(loop).check_health()
    finally:
        loop.close()
