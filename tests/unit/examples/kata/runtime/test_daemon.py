"""What the daemon does beside serving: it ends what virtual machines have left in clusters."""

import asyncio
from typing import Any, cast

import pytest

from examples.kata.runtime import daemon


class Session:
    """A registration that lasts."""

    def __init__(self) -> None:
        self.registered, self.lost = asyncio.Event(), asyncio.Event()
        self.registered.set()


class UnansweredClaim:
    """A claim whose cluster does not answer at first."""

    def __init__(self) -> None:
        self.tries = 0
        self.given_back = asyncio.Event()

    async def give_back_left(self) -> None:
        self.tries += 1
        if self.tries == 3:
            self.given_back.set()


async def test_claim_of_silent_cluster_is_given_back_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon, "GIVE_BACK_S", 0)
    session, left = cast("Any", Session()), UnansweredClaim()
    trying = asyncio.create_task(daemon._give_back(session, cast("Any", left)))
    async with asyncio.timeout(60):
        await left.given_back.wait()
    trying.cancel()
    await asyncio.gather(trying, return_exceptions=True)
