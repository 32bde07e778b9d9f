"""What a process does after its answers: log lines, metrics, events."""

import asyncio

from crust.core import operations


async def reported() -> None:
    """Return when all of it is done for the answers until now, of the servers in this event loop."""
    done = asyncio.Event()
    operations.after_answer(done.set)
    await done.wait()
