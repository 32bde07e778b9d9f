"""Answers that are shown again at each change."""

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.nodes.commands import published
from tests.support.nodes.fake_node import FakeNode


@asynccontextmanager
async def _started(
    node: FakeNode, *words: str, stdout: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, which is killed where a test fails before it has ended."""
    arguments = (*words, "--watch", "--run-dir", node.places.run)
    environ = {**os.environ, "TERM": "xterm"}
    # a run that a shell has started in the background ignores SIGINT
    handled = ("env", "--default-signal=INT")
    process = await asyncio.create_subprocess_exec(
        *handled, sys.executable, "-m", "crust", *arguments, stdout=stdout, env=environ
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_watch_prints_each_change_and_ctrl_c_exits_130(node: FakeNode) -> None:
    watch = _started(node, "volumes", "-o", "json", stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60), watch as process:
        assert process.stdout is not None
        assert json.loads(await process.stdout.readline()) == {"volumes": []}
        await published(node)
        listed = json.loads(await process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
    assert [volume["volume_id"] for volume in listed["volumes"]] == ["vol-1"]


async def test_watch_on_a_terminal_restores_it(node: FakeNode) -> None:
    leader, follower = pty.openpty()
    text = b""
    try:
        async with asyncio.timeout(60), _started(node, "volumes", stdout=follower) as process:
            os.close(follower)
            while b"SANDBOX" not in text:
                text += await asyncio.to_thread(os.read, leader, 4096)
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130
            while b"\x1b[?1049l" not in text:
                text += await asyncio.to_thread(os.read, leader, 4096)
    finally:
        os.close(leader)
    assert text.index(b"\x1b[?1049h") < text.index(b"SANDBOX") < text.index(b"\x1b[?1049l")
