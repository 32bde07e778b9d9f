"""Starts and stops sandboxes as lines of text say: the front end that `crust conformance --runtime` speaks to.

    start SANDBOX MOUNT_SOURCE   ok; refused WHY; ordinary: the source is no deferred volume
    stop SANDBOX                 ok; also if it is not there

A sandbox has a volume and no container here. docs/runtime-author.md describes the lines.
"""

import asyncio
from dataclasses import dataclass

from crust import runtime_handler
from crust.core import errors, volumes
from examples.kata.runtime import ports
from examples.kata.runtime.sandboxes import Sandboxes


@dataclass(frozen=True, slots=True)
class Lines:
    """Answers one line at a time."""

    sandboxes: Sandboxes
    handoff: ports.Handoff

    async def answer(self, line: str) -> str:
        """The answer to a line, without a newline."""
        try:
            match line.split():
                case ["start", sandbox, source]:
                    return await self._start(volumes.SandboxId(sandbox), source)
                case ["stop", sandbox]:
                    await self.sandboxes.stop(volumes.SandboxId(sandbox))
                    return "ok"
        except errors.CrustError as error:
            return f"refused {' '.join(error.shown().split())}"
        return "refused the line is not understood"

    async def _start(self, sandbox_id: volumes.SandboxId, source: str) -> str:
        found = await asyncio.to_thread(self.handoff.resolve, source)
        if isinstance(found, runtime_handler.NotDeferred):
            return "ordinary"
        sandbox = await self.sandboxes.get(sandbox_id)
        await sandbox.use(found.record)
        return "ok"
