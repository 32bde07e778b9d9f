"""What the proxy reports of the claims that its scans have read."""

import asyncio
import datetime
from collections.abc import AsyncIterator, Callable

import pytest

from crust.handoff.claims import Claim, State
from crust.handoff.entry import Entry
from crust.proxy.deferrals.claim_events import ClaimEvents
from crust.proxy.deferrals.events import Event, Events
from tests.support.records import records

RECORD = records.a_record()
SINCE = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


def entry(claim: Claim | None) -> Entry:
    return Entry(RECORD.digest, "/entry", RECORD, claim=claim)


def claim(box: str, state: State = State.CLAIMED, *, error: str = "", live: bool = True) -> Claim:
    return Claim(box, "kata", state, error, 7, SINCE, live)


UNNAMED = claim("")
A_BOOTS, A_RUNS = claim("a"), claim("a", State.MOUNTED)
A_FAILED = claim("a", State.ERROR, error="no kernel")
A_ENDED = claim("a", State.ERROR, error="no kernel", live=False)


@pytest.mark.parametrize(
    ("read", "reported"),
    [
        ([None, None], []),
        ([UNNAMED, A_BOOTS, A_BOOTS], ["claimed: sandbox a"]),
        ([A_BOOTS, A_RUNS, A_RUNS], ["claimed: sandbox a", "mounted: sandbox a"]),
        ([A_RUNS], ["claimed: sandbox a", "mounted: sandbox a"]),
        ([A_BOOTS, UNNAMED], ["claimed: sandbox a"]),  # its lock is still held
        ([A_BOOTS, UNNAMED, None], ["claimed: sandbox a", "released: sandbox a"]),
        ([A_BOOTS, A_FAILED], ["claimed: sandbox a", "failed: sandbox a: no kernel"]),
        ([A_BOOTS, A_ENDED], ["claimed: sandbox a", "released: sandbox a: no kernel"]),
        ([A_BOOTS, claim("b")], ["claimed: sandbox a", "released: sandbox a", "claimed: sandbox b"]),
        (
            [A_BOOTS, claim("b", State.ERROR, error="b's")],
            ["claimed: sandbox a", "released: sandbox a", "claimed: sandbox b", "failed: sandbox b: b's"],
        ),
    ],
)  # fmt: skip
async def test_scans_become_the_events_of_what_lies_between(
    read: list[Claim | None], reported: list[str]
) -> None:
    events = Events()
    claims = ClaimEvents(events)
    async with events.watch() as watch:
        for each in read:
            claims.report(entry(each))
        assert await _heard(events, watch) == reported


async def test_unpublish_ends_a_claim_whose_release_no_scan_has_seen() -> None:
    events = Events()
    claims = ClaimEvents(events)
    async with events.watch() as watch:
        claims.report(entry(A_BOOTS))
        claims.report_gone(lambda target: target == RECORD.target)
        claims.report_gone(lambda _: False)
        claims.report_gone(lambda _: False)
        assert await _heard(events, watch) == ["claimed: sandbox a", "released: sandbox a"]


async def _heard(
    events: Events, watch: Callable[[asyncio.Event], AsyncIterator[Event]]
) -> list[str]:
    """All events until now."""
    events.emit(Event("end"))
    heard: list[str] = []
    async for event in watch(asyncio.Event()):
        if event.kind == "end":
            return heard
        heard.append(f"{event.kind}: {event.message}")
    return heard
