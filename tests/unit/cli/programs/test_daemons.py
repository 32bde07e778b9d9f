"""Each daemon: its settings, its signals and its end."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from crust.blockdriver.settings import DriverSettings
from crust.cli.programs import daemons
from crust.core import operations
from crust.host.process import workers
from crust.host.process.workers import Workers
from tests.support.nodes.started_programs import start, until_logged
from tests.unit.cli.programs.conftest import shim


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


@pytest.mark.parametrize("toml", ['log_format = "json"\ncolour = 1\n', "colour = 1\n"])
def test_refused_settings_are_an_error_of_the_log(tmp_path: Path, toml: str) -> None:
    """In the journal by its priority, and as JSON where the collector of all other lines reads it."""
    config, log = tmp_path / "shim.toml", tmp_path / "log"
    config.write_text(toml)
    with log.open("w") as stderr:
        status = os.fstat(stderr.fileno())
        journal = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        command = (sys.executable, "-m", "crust", "shim", f"--config={config}")
        done = subprocess.run(command, stderr=stderr, env={**os.environ, **journal}, check=False)
    assert done.returncode == 2
    (line,) = log.read_text().splitlines()
    assert line.startswith("<3>")
    fields = json.loads(line[3:]) if "json" in toml else {"error_name": "InvalidSettings"}
    assert fields["error_name"] == "InvalidSettings"
    assert "colour is no setting" in line


async def test_daemon_limits_its_core_file_and_not_its_descriptors(tmp_path: Path) -> None:
    """A core file would have the secrets of volumes; the limit of descriptors is the one of its service or pod."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, most - 1), most))
    try:
        process = await shim(tmp_path, "--metrics-address=127.0.0.1:0")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
    try:
        await until_logged(process, b"metrics  address=")
        assert resource.prlimit(process.pid, resource.RLIMIT_CORE) == (0, 0)
        assert "\nUmask:\t0077\n" in Path(f"/proc/{process.pid}/status").read_text()
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (most, most)
    finally:
        process.kill()
        await process.communicate()


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
