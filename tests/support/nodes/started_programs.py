"""Programs of crust as processes of their own, and what they write."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process

RUN = "from crust.cli.main import main; main()"


async def start(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, *arguments, stdout=PIPE, stderr=PIPE
    )


async def until_logged(process: Process, words: bytes) -> str:
    """Read lines up to one with the words."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while words not in (line := await process.stderr.readline()):
            assert line, "it ended"
    return line.decode()


async def output(process: Process) -> str:
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return (out + err).decode()
