"""What every daemon has in common."""

import asyncio
import threading

from crust.cli import daemons


def test_forty_hanging_calls_leave_threads_for_others() -> None:
    dead, answers = threading.Event(), []

    async def run() -> None:
        hung = [asyncio.create_task(asyncio.to_thread(dead.wait)) for _ in range(40)]
        await asyncio.sleep(0)
        try:
            answers.append(await asyncio.to_thread(lambda: "alive"))
        finally:
            dead.set()
            await asyncio.gather(*hung)

    asyncio.run(daemons.until_signal(run()))
    assert answers == ["alive"]
