"""`crust proxy` as a process: how it starts, refuses to start, stops, and is killed."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crust.rpc import channel
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Places

RUN = "from crust.cli.main import main; main()"


async def start(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, *arguments, stdout=PIPE, stderr=PIPE
    )


def flags(places: Places, **changes: str) -> list[str]:
    given = {
        "run-dir": places.run,
        "volumes-root": places.volumes,
        "target-root": places.kubelet,
        "driver": f"{nodes.DRIVER},{places.csi},{places.shim}",
    }
    options = [f"--{name}={value}" for name, value in {**given, **changes}.items()]
    return ["proxy", "--no-check-propagation", *options]


async def until_logged(process: Process, words: bytes) -> str:
    """Read lines up to one with the words."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while words not in (line := await process.stderr.readline()):
            assert line, "it ended"
    return line.decode()


@asynccontextmanager
async def proxy(places: Places) -> AsyncIterator[Process]:
    """A proxy that serves; killed at the end if it still runs."""
    process = await start(*flags(places))
    try:
        await until_logged(process, b"proxy serves")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def output(process: Process) -> str:
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return (out + err).decode()


async def test_second_proxy_on_one_handoff_directory_is_refused(places: Places) -> None:
    """Two vendors' DaemonSets: each has a run directory and a socket of its own, and both write one directory."""
    socket, run_dir = f"{places.root}/other.sock", f"{places.root}/other"
    driver = f"other.example.com,{socket},{places.shim}"
    async with proxy(places) as first:
        second = await start(*flags(places, **{"run-dir": run_dir, "driver": driver}))
        text = await output(second)
        assert second.returncode == 1
        assert f"{places.volumes}/.writer.lock is locked" in text
        assert str(first.pid) in text
        assert not os.path.exists(socket)


async def test_second_proxy_names_first_and_serves_after_it(places: Places) -> None:
    async with proxy(places) as first:
        second = await start(*flags(places))
        try:
            line = await until_logged(second, b"waits for another process")
            assert f"process {first.pid} holds it" in line
            assert Path(places.csi).is_socket()
            first.send_signal(signal.SIGTERM)
            text = await output(first)
            assert (first.returncode, "stopped" in text) == (0, True), text
            await until_logged(second, b"proxy serves")
            assert Path(places.csi).is_socket()
        finally:
            second.kill()
            await second.communicate()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["proxy"], "drivers"),
        (["proxy", "--driver=bad name,/a.sock,/b.sock"], "name"),
        (["proxy", "--driver=just-a-name"], "NAME,SOCKET,BACKEND"),
        (["shim", "--socket=/run/a.sock"], "driver_socket"),
    ],
)
async def test_invalid_settings_exit_with_2(arguments: list[str], words: str) -> None:
    process = await start(*arguments)
    text = await output(process)
    assert process.returncode == 2
    assert words in text
    assert "Traceback" not in text


async def test_sockets_are_accessible_to_the_owner_only(places: Places) -> None:
    """Sockets 0600 in a directory 0700: only root may connect."""
    async with proxy(places):
        assert Path(places.run).stat().st_mode & 0o777 == 0o700
        served = {path for path in Path(places.root).rglob("*") if path.is_socket()}
        sockets = places.sockets
        named = {places.csi, sockets.runtime, sockets.handlers, sockets.inspect}
        assert named <= set(map(str, served))
        assert {path for path in served if path.stat().st_mode & 0o777 != 0o600} == set()
        async with channel.connect(places.sockets.inspect) as connected:
            async with asyncio.timeout(60):
                await connected.channel_ready()
