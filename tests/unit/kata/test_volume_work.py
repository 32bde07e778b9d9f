"""The work of the engine's calls: deadline, undo, and one thread for a volume."""

import asyncio
import threading
import time

import pytest

from crust.kata.volume_work import Attempt, VolumeWork
from tests.support.raised import raised


class Hanging:
    """Work that hangs until it may go on, before or after it is committed."""

    def __init__(self, *, commits_first: bool) -> None:
        self._commits_first = commits_first
        self._go_on = threading.Event()
        self.hangs, self.ended = threading.Event(), threading.Event()
        self.is_committed = False

    def __call__(self, attempt: Attempt) -> None:
        if self._commits_first:
            self.is_committed = attempt.decide()
        self.hangs.set()
        assert self._go_on.wait(60)
        if not self._commits_first:
            self.is_committed = attempt.decide()
        self.ended.set()

    async def end(self) -> None:
        """Let it go on, and wait for its end."""
        self._go_on.set()
        assert await asyncio.to_thread(self.ended.wait, 60)


async def test_work_whose_time_is_over_is_not_committed() -> None:
    work, hanging = VolumeWork(), Hanging(commits_first=False)
    with raised("EngineTimeOver"):
        await work.run({"a"}, "app", time.monotonic(), hanging)
    await hanging.end()
    assert not hanging.is_committed


async def test_work_that_is_committed_is_answered_at_the_deadline() -> None:
    """The engine ends the connection of a plugin that is late."""
    work, hanging = VolumeWork(), Hanging(commits_first=True)
    running = asyncio.ensure_future(work.run({"a"}, "app", time.monotonic() + 0.5, hanging))
    assert await asyncio.to_thread(hanging.hangs.wait, 60)
    await running
    with raised("EngineTimeOver", match="an earlier call, of container app"):
        await work.run({"b", "a"}, "app", time.monotonic() + 60, lambda _: None)
    await work.run({"b"}, "app", time.monotonic() + 60, lambda _: None)
    await hanging.end()


async def test_work_that_failed_gives_its_volumes_back() -> None:
    work = VolumeWork()

    def fail(_: Attempt) -> None:
        raise OSError("the disk answers with errors")

    for _ in range(2):
        with pytest.raises(OSError, match="the disk"):
            await work.run({"a"}, "app", time.monotonic() + 60, fail)
