"""What every daemon has in common."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from crust.cli.programs import daemons
from crust.core import operations
from crust.core.settings.driver import DriverSettings
from crust.host.process import workers


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
        running = operations.KeyedOperations()
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


def test_settings_file_in_etc_is_read_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons, "CONFIG_DIR", tmp_path)
    flags = {"socket": "/run/s.sock", "node_id": "n"}
    assert daemons.settings_of(DriverSettings, "driver", dict(flags)).overcommit == 1
    (tmp_path / "driver.toml").write_text("overcommit = 2")
    assert daemons.settings_of(DriverSettings, "driver", dict(flags)).overcommit == 2
    (tmp_path / "other.toml").write_text("overcommit = 3")
    named = {**flags, "config": tmp_path / "other.toml"}
    assert daemons.settings_of(DriverSettings, "driver", named).overcommit == 3


def test_command_line_alone_imports_no_settings_no_grpc_and_no_daemon() -> None:
    script = (
        "import sys, crust.cli.main; print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert {"click", "crust"} <= loaded
    assert not {"pydantic", "grpc", "google", "prometheus_client"} & loaded
