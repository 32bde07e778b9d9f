"""Metrics and health over HTTP: off unless configured; a port that cannot be served ends the start."""

import asyncio
import re
import sys
import urllib.error
import urllib.request
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

RUN = "from crust.cli.main import main; main()"


async def shim(directory: Path, *flags: str) -> Process:
    """A shim, which starts without its peers. It wraps nothing: a private mount namespace would end its start."""
    sockets = (
        f"--socket={directory}/shim.sock",
        f"--driver-socket={directory}/driver.sock",
        f"--runtime-socket={directory}/runtime.sock",
    )
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, "shim", "--no-wrap", *sockets, *flags, stdout=PIPE, stderr=PIPE
    )


async def line_with(process: Process, word: bytes) -> str:
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while word not in (line := await process.stderr.readline()):
            assert line, "it ended before it said so"
    return line.decode()


def read(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_metrics_health_and_readiness_are_served_by_path(tmp_path: Path) -> None:
    process = await shim(tmp_path, "--metrics-address=127.0.0.1:0")
    try:
        line = await line_with(process, b"metrics  address=")
        found = re.search(r"address=(\S+)", line)
        assert found is not None
        code, text = await asyncio.to_thread(read, found[1], "/metrics?x=1")
        assert code == 200
        for name in ("csi_operations_seconds histogram", "process_resident_memory_bytes gauge"):
            assert f"# TYPE {name}" in text
        assert "crust_build_info{" in text
        assert re.search(r"^crust_log_queue_bytes \d", text, re.MULTILINE)
        # those are the proxy's and the driver's
        assert not re.search("crust_(runtime_handlers|pool_open|deferred_volumes)", text)
        assert await asyncio.to_thread(read, found[1], "/healthz") == (200, "ok\n")
        code, text = await asyncio.to_thread(read, found[1], "/readyz")
        assert (code, text[0]) == (503, "[")
        for path in ("/", "/metrics/", "/health", "/metricsx"):
            code, _ = await asyncio.to_thread(read, found[1], path)
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
        async with asyncio.timeout(60):
            _, said = await process.communicate()
    assert process.returncode == 1
    assert f"cannot serve metrics on {address}" in said.decode()
    assert b"Traceback" not in said
    assert not (tmp_path / "shim.sock").exists()


@pytest.mark.parametrize("address", ["9090", "localhost", "127.0.0.1:", "http://127.0.0.1:9090"])
async def test_invalid_metrics_address_is_refused(tmp_path: Path, address: str) -> None:
    process = await shim(tmp_path, f"--metrics-address={address}")
    async with asyncio.timeout(60):
        _, said = await process.communicate()
    assert process.returncode == 2
    assert b"metrics_address" in said


async def test_port_above_65535_is_refused(tmp_path: Path) -> None:
    process = await shim(tmp_path, "--metrics-address=127.0.0.1:65536")
    async with asyncio.timeout(60):
        _, said = await process.communicate()
    assert process.returncode == 1
    assert b"a port is at most 65535" in said
