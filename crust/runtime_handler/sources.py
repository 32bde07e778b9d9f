"""Finds, in a coroutine, the deferred volume that a mount source names: `crust.runtime_handler.blocking.resolve`.

It reads the handoff directory, the mounts and the source's own path, whose filesystem may hang.
"""

import aiofiles.os

from crust.runtime_handler import threads
from crust.runtime_handler.blocking import resolve

_resolve_source = aiofiles.os.wrap(resolve.resolve_source)


async def resolve_source(root: str, source: str) -> resolve.Resolved | resolve.NotDeferred:
    """Resolve the source of a bind mount, with the handoff directory at `root`.

    Raises as `blocking.resolve_source`, and `NoWorkerFree`.
    """
    await threads.POOL.check_free()
    resolved: resolve.Resolved | resolve.NotDeferred
    resolved = await _resolve_source(root, source, executor=threads.EXECUTOR)
    return resolved
