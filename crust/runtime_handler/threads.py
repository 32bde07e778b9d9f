"""The threads of the SDK, on which its coroutines reach files: one hop for a call of `blocking`.

    reads       calls that only read go through aiofiles, with EXECUTOR in the place of the event loop's
    changes     calls that lock, write and sync go to a thread themselves: `run`, `run_or_undo`

They are daemons, and never the event loop's own threads (docs/decisions/0043): a file that hangs keeps one thread.
When all threads hang, a call fails with `NoWorkerFree`.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from crust.host.process.workers import PoolExecutor, Workers

T = TypeVar("T")

POOL = Workers("the runtime handler's SDK", limit=32)
EXECUTOR = PoolExecutor(POOL.run)


async def run(function: Callable[[], T]) -> T:
    """Call `function` on a thread. Raises its errors, and `NoWorkerFree`."""
    await POOL.check_free()
    return await POOL.run(function)


async def run_or_undo(function: Callable[[], T], undo: Callable[[T], object]) -> T:
    """As `run`; if the caller is cancelled meanwhile, what `function` returns is undone on its thread.

    Otherwise a claim would live that nobody has.
    """
    guard, made, is_cancelled = threading.Lock(), list[T](), False

    def make() -> Any:
        result = function()
        with guard:
            if not is_cancelled:
                made.append(result)
                return result
        undo(result)
        return None

    try:
        return await run(make)
    except asyncio.CancelledError:
        with guard:  # exactly one of both has the result
            is_cancelled = True
        for result in made:
            # on a thread of its own: the loop may end with this task
            threading.Thread(target=undo, args=(result,), daemon=True).start()
        raise
