"""Each daemon: its flags, its metrics and its health over HTTP."""

import asyncio
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import prometheus_client
import pytest

from crust.blockdriver.settings import DriverSettings
from crust.cli.programs import daemons, monitoring
from crust.core import errors, operations
from crust.host.process import workers
from crust.host.process.workers import Workers
from crust.rpc.serving.daemon import Daemon, starting
from tests.support.raised import raised
from tests.unit.proxy.test_restart import output, start, until_logged


def test_forty_hanging_calls_leave_threads_for_others() -> None:
    dead, answers = threading.Event(), []

    async def run() -> None:
        hung = [asyncio.create_task(workers.run(dead.wait)) for _ in range(40)]
        await asyncio.sleep(0)
        try:
            answers.append(await workers.run(lambda: "alive"))
        finally:
            dead.set()
            await asyncio.gather(*hung)

    asyncio.run(daemons.until_signal(run()))
    assert answers == ["alive"]


def test_second_sigterm_cancels_no_running_operation() -> None:
    """Found with resize2fs in the place of the operation: the second signal killed it in the middle of its writes."""
    ended: list[str] = []

    async def operation() -> None:
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)  # handled while the drain waits
        for _ in range(10):
            await asyncio.sleep(0)
        ended.append("the operation")

    async def serve() -> None:
        running = operations.KeyedOperations(Workers("the test"))
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.get_running_loop().create_future()
        finally:
            call = asyncio.create_task(running.run("vol-1", "growth", None, operation))
            await asyncio.sleep(0)
            await running.drain()
            await call
            ended.append("the daemon")

    asyncio.run(daemons.until_signal(serve()))
    assert ended == ["the operation", "the daemon"]


def test_stop_that_hangs_ends_the_process_and_says_what_hung() -> None:
    """A call that the kernel does not let go: the successor must not wait for it."""
    script = """if True:
        import asyncio, os, signal
        from crust.core import logs
        from crust.cli.programs import daemons

        async def serve():
            asyncio.create_task(asyncio.Event().wait(), name="a hung operation")
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.Event().wait()

        logs.configure(level="info", fmt="console")
        asyncio.run(daemons.until_signal(serve(), 0.01))
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "it has not stopped in time" in done.stderr
    assert "a hung operation" in done.stderr


def test_unnamed_settings_file_is_in_etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "CONFIG_DIR", tmp_path)

    def overcommit(**flags: Path) -> float:
        given = {"socket": "/run/s.sock", "node_id": "n", **flags}
        settings = daemons.settings_of("driver", given)
        assert isinstance(settings, DriverSettings)
        return settings.overcommit

    assert overcommit() == 1
    (tmp_path / "driver.toml").write_text("overcommit = 2")
    assert overcommit() == 2
    (tmp_path / "other.toml").write_text("overcommit = 3")
    assert overcommit(config=tmp_path / "other.toml") == 3


async def shim(directory: Path, *flags: str) -> Process:
    """A shim, which starts without its peers. It wraps nothing: a private mount namespace would end its start."""
    sockets = (
        f"--socket={directory}/shim.sock",
        f"--driver-socket={directory}/driver.sock",
        f"--runtime-socket={directory}/runtime.sock",
    )
    return await start("shim", "--no-wrap", *sockets, *flags)


async def test_daemon_leaves_no_core_file_with_its_secrets(tmp_path: Path) -> None:
    process = await shim(tmp_path, "--metrics-address=127.0.0.1:0")
    try:
        await until_logged(process, b"metrics  address=")
        assert resource.prlimit(process.pid, resource.RLIMIT_CORE) == (0, 0)
    finally:
        process.kill()
        await process.communicate()


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


async def test_daemon_shows_the_control_groups_that_it_excepts(tmp_path: Path) -> None:
    directories = (f"--state-dir={tmp_path}/pool", f"--run-dir={tmp_path}/run")
    flags = ("--no-check-propagation", "--node-id=n", "--create-pool", *directories)
    socket = f"--socket={tmp_path}/csi.sock"
    process = await start("driver", socket, *flags, "--excepted-group=/agent.slice")
    try:
        await until_logged(process, b"excepted_groups excepts those of /agent.slice")
    finally:
        process.kill()
        await process.communicate()
