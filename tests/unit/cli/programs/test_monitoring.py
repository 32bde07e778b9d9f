"""The metrics and the health of a daemon over HTTP."""

import asyncio
import logging
import re
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import prometheus_client
import pytest

from crust.cli.programs import monitoring
from crust.core import errors
from crust.rpc.serving.daemon import Daemon, starting
from tests.support.nodes.started_programs import output, until_logged
from tests.support.raised import raised
from tests.unit.cli.programs.conftest import shim


def read(address: str, path: str, accept: str = "*/*") -> tuple[int, str]:
    asked = urllib.request.Request(f"http://{address}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_metrics_health_and_readiness_are_served_by_path(tmp_path: Path) -> None:
    process = await shim(tmp_path, "--metrics-address=127.0.0.1:0")
    try:
        line = await until_logged(process, b"metrics  address=")
        address = re.search(r"address=(\S+)", line)
        assert address is not None
        code, text = await asyncio.to_thread(read, address[1], "/metrics?x=1")
        assert code == 200
        for name in ("csi_operations_seconds histogram", "process_resident_memory_bytes gauge"):
            assert f"# TYPE {name}" in text
        assert "crust_build_info{" in text
        assert re.search(r"^crust_log_queue_bytes \d", text, re.MULTILINE)
        # those are the proxy's and the driver's
        assert not re.search("crust_(runtime_handlers|pool_open|deferred_volumes)", text)
        assert await asyncio.to_thread(read, address[1], "/healthz") == (200, "ok\n")
        code, text = await asyncio.to_thread(read, address[1], "/readyz")
        assert (code, text[0]) == (503, "[")
        for path in ("/", "/metrics/", "/health", "/metricsx"):
            code, _ = await asyncio.to_thread(read, address[1], path)
            assert code == 404
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0


async def test_port_in_use_ends_start_with_error(tmp_path: Path) -> None:
    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as taken:
        address = "{}:{}".format(*taken.sockets[0].getsockname())
        process = await shim(tmp_path, f"--metrics-address={address}")
        written = await output(process)
    assert process.returncode == 1
    assert f"cannot serve metrics on {address}" in written
    assert "Traceback" not in written
    assert not (tmp_path / "shim.sock").exists()


@pytest.mark.parametrize(
    ("address", "code", "words"),
    [
        ("9090", 2, "metrics_address"),
        ("localhost", 2, "metrics_address"),
        ("127.0.0.1:", 2, "metrics_address"),
        ("http://127.0.0.1:9090", 2, "metrics_address"),
        ("127.0.0.1:65536", 1, "a port is at most 65535"),
    ],
)
async def test_invalid_metrics_address_is_refused(
    tmp_path: Path, address: str, code: int, words: str
) -> None:
    process = await shim(tmp_path, f"--metrics-address={address}")
    written = await output(process)
    assert (process.returncode, words in written) == (code, True), written


@asynccontextmanager
async def monitored(caplog: pytest.LogCaptureFixture) -> AsyncIterator[str]:
    caplog.set_level(logging.INFO)
    with monitoring.serving("127.0.0.1:0"):
        (line,) = [vars(record) for record in caplog.records if record.msg == "metrics"]
        yield str(line["address"])


async def answers(address: str) -> tuple[int, int, str]:
    healthy, _ = await asyncio.to_thread(read, address, "/healthz")
    ready, why = await asyncio.to_thread(read, address, "/readyz")
    return healthy, ready, why


async def test_process_is_ready_while_it_and_its_parts_serve(
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
        host, _, port = address.rpartition(":")
        with ExitStack() as held:
            slow = [
                held.enter_context(socket.create_connection((host, int(port)), timeout=20))
                for _ in range(2)
            ]
            slow[0].sendall(b"GET /healthz HT")
            assert await asyncio.to_thread(read, address, "/healthz") == (200, "ok\n")
            assert await asyncio.to_thread(slow[0].recv, 1) == b""


_OPEN_METRICS = "application/openmetrics-text"


class Counted:
    """A collector that counts the renderings of the page."""

    def __init__(self) -> None:
        self.times = 0

    def collect(self) -> list[prometheus_client.Metric]:
        self.times += 1
        return []


@pytest.mark.parametrize(("page_s", "renderings"), [(3600.0, 2), (0.0, 12)])
async def test_metrics_are_rendered_once_in_their_time(
    page_s: float,
    renderings: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that reaches the port must not take a core from the calls of the node."""
    monkeypatch.setattr(monitoring, "PAGE_S", page_s)
    async with monitored(caplog) as address:
        counted = Counted()
        prometheus_client.REGISTRY.register(counted)  # which calls it
        counted.times = 0
        try:
            plain = [asyncio.to_thread(read, address, "/metrics") for _ in range(6)]
            opened = [
                asyncio.to_thread(read, address, "/metrics", f"{_OPEN_METRICS}; version=1.0.{n}")
                for n in range(6)
            ]
            texts = await asyncio.gather(*plain, *opened)
        finally:
            prometheus_client.REGISTRY.unregister(counted)
    assert [code for code, _ in texts] == [200] * 12
    assert [text.endswith("# EOF\n") for _, text in texts] == [False] * 6 + [True] * 6
    assert counted.times == renderings


def test_loop_that_hangs_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "ANSWER_S", 0.01)
    loop = asyncio.new_event_loop()  # it does not run
    try:
        with raised("LoopHangs", match=re.escape("its event loop has not answered")):
            monitoring._Monitor(loop).check_health()
    finally:
        loop.close()
