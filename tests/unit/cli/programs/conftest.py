"""A daemon that runs."""

from asyncio.subprocess import Process
from pathlib import Path

from tests.support.nodes.started_programs import start


async def shim(directory: Path, *flags: str) -> Process:
    """A shim, which starts without its peers. It wraps nothing: a private mount namespace would end its start."""
    sockets = (
        f"--socket={directory}/shim.sock",
        f"--driver-socket={directory}/driver.sock",
        f"--runtime-socket={directory}/runtime.sock",
    )
    return await start("shim", "--no-wrap", *sockets, *flags)
