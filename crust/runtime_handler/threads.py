"""The threads of the SDK, on which its coroutines reach files: one hop for a call of `blocking`.

    reads       calls that only read go through aiofiles, with EXECUTOR in the place of the event loop's
    changes     calls that lock, write and sync go to a thread themselves: `run`, `run_or_undo`

They are never the event loop's own threads, for which the end of asyncio.run() and of the process waits: these are
daemons. So a file that hangs keeps one thread, and stops neither the loop nor the end of the process. When all
threads hang, a call fails with `NoWorkerFree` instead of waiting.
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
    delivery = _Delivery(function, undo)
    try:
        return await run(delivery.make)
    except asyncio.CancelledError:
        delivery.cancel()
        raise


class _Delivery:
    """What a thread made, for a coroutine that may have gone: exactly one of them has it."""

    def __init__(self, function: Callable[[], T], undo: Callable[[T], object]) -> None:
        self._function = function
        self._undo: Callable[[Any], object] = undo
        self._guard = threading.Lock()
        self._made: list[Any] = []
        self._is_cancelled = False

    def make(self) -> Any:
        result = self._function()
        with self._guard:
            if not self._is_cancelled:
                self._made.append(result)
                return result
        self._undo(result)
        return None

    def cancel(self) -> None:
        """Undo what was made on a thread of its own: the loop may end with this task."""
        with self._guard:
            self._is_cancelled = True
            made = self._made.copy()
        for result in made:
            threading.Thread(target=self._undo, args=(result,), daemon=True).start()
