"""A container of a whole node that writes until it is killed, and counts its rounds."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from examples.kata.runtime import messages
from tests.support.nodes.whole_node import WholeNode


@dataclass
class Writer:
    """The container; it prints a line per finished round, and `rounds` counts them."""

    rounds: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def next_round(self) -> None:
        """Wait until it has begun and finished a round since now."""
        before = self.rounds
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: self.rounds >= before + 2)

    def on_output(self, _stream: str, data: bytes) -> None:
        """Count the rounds of a piece of output."""
        self.rounds += data.count(b"\n")
        self._notifying = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


@asynccontextmanager
async def writing(
    node: WholeNode, script: str, targets: Mapping[str, Path]
) -> AsyncIterator[Writer]:
    """Run `script` in sandbox "one" with each target path mounted at its key; killed when the block is left."""
    writer = Writer()
    mounts = tuple(
        messages.Mount(source=str(target), destination=at) for at, target in targets.items()
    )
    request = messages.Run(sandbox="one", argv=("/bin/sh", "-ec", script), mounts=mounts, keep=True)
    running = asyncio.create_task(node.runtime.run(request, writer.on_output))
    try:
        await writer.next_round()
        yield writer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
