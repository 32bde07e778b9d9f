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


def flags(places: Places) -> list[str]:
    return [
        "proxy",
        f"--run-dir={places.run}",
        f"--volumes-root={places.volumes}",
        f"--target-root={places.kubelet}",
        "--no-check-propagation",
        f"--driver={nodes.DRIVER},{places.csi},{places.shim}",
    ]


@asynccontextmanager
async def proxy(places: Places) -> AsyncIterator[Process]:
    """A proxy that serves; killed at the end if it still runs."""
    process = await start(*flags(places))
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while b"proxy serves" not in (line := await process.stderr.readline()):
                assert line, "it ended before it served"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: Process) -> str:
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return (out + err).decode()


async def test_second_proxy_on_one_handoff_directory_is_refused(places: Places) -> None:
    """Two vendors' DaemonSets: each has a run directory and a socket of its own, and both write one directory."""
    other = [
        "proxy",
        f"--run-dir={places.root}/other",
        f"--volumes-root={places.volumes}",
        f"--target-root={places.kubelet}",
        "--no-check-propagation",
        f"--driver=other.example.com,{places.root}/other.sock,{places.shim}",
    ]
    async with proxy(places) as first:
        second = await start(*other)
        text = await said(second)
        assert second.returncode == 1
        assert f"{places.volumes}/.writer.lock is locked" in text
        assert str(first.pid) in text
        assert not os.path.exists(f"{places.root}/other.sock")


async def test_sigterm_ends_it_cleanly(places: Places) -> None:
    async with proxy(places) as process:
        assert Path(places.csi).is_socket()
        process.send_signal(signal.SIGTERM)
        text = await said(process)
        assert process.returncode == 0, text
        assert "stopped" in text
        assert not Path(places.csi).exists()


async def test_second_proxy_names_the_first_and_serves_when_that_has_ended(places: Places) -> None:
    async with proxy(places) as first:
        second = await start(*flags(places))
        assert second.stderr is not None
        try:
            async with asyncio.timeout(60):
                while b"waits for another process" not in (line := await second.stderr.readline()):
                    assert b"proxy serves" not in line
            assert f"process {first.pid} holds it" in line.decode()
            assert Path(places.csi).is_socket()
            first.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                while b"proxy serves" not in (line := await second.stderr.readline()):
                    assert line, "it ended before it served"
            await first.wait()
            assert Path(places.csi).is_socket()
        finally:
            second.kill()
            await second.communicate()


async def test_after_a_kill_the_next_one_serves_on_the_same_sockets(places: Places) -> None:
    async with proxy(places) as process:
        process.kill()
        await process.wait()
    assert Path(places.csi).is_socket()
    async with proxy(places):
        shown = await start("status", f"--run-dir={places.run}")
        text = await said(shown)
        assert shown.returncode == 1, text  # there is no driver, and no handler
        assert nodes.DRIVER in text
        assert "HandlerNotRegistered" in text


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
    text = await said(process)
    assert process.returncode == 2
    assert words in text
    assert "Traceback" not in text


async def test_sockets_are_accessible_to_the_owner_only(places: Places) -> None:
    """Sockets 0600 in a directory 0700: only root may connect."""
    async with proxy(places):
        assert Path(places.run).stat().st_mode & 0o777 == 0o700
        served = {each for each in Path(places.root).rglob("*") if each.is_socket()}
        sockets = places.sockets
        assert {places.csi, sockets.runtime, sockets.handlers, sockets.inspect} <= set(
            map(str, served)
        )
        assert {each for each in served if each.stat().st_mode & 0o777 != 0o600} == set()
        async with channel.connect(places.sockets.inspect) as connected:
            async with asyncio.timeout(60):
                await connected.channel_ready()
