"""The timer of a freeze on this host, when it is faster than the freeze, and when its thaw fails."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from crust.blockdriver.guests import Guests
from crust.blockdriver.host import fsfreeze
from crust.blockdriver.snapshots.freezer import Freezer
from crust.blockdriver.snapshots.host_freeze import HostFreezes, Intent, Intents, OnHost
from crust.core import errors, volumes
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.faults import lies
from tests.support.raised import raised

MOUNTED = OnHost(volumes.VolumeId("vol-1"), volumes.DeviceIdentity(7, 1, 1), "/mnt")


def _frozen_by(
    monkeypatch: pytest.MonkeyPatch, *, freezing: Callable[[], object], thawing: Callable[[], bool]
) -> None:
    class Freeze:
        def __init__(self, mountpoint: str) -> None:
            freezing()

        def thaw(self) -> bool:
            return thawing()

    monkeypatch.setattr(fsfreeze, "Freeze", Freeze)


def test_freeze_that_ends_after_its_limit_is_undone_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flush took longer than the limit; the copy that follows may take long, too."""
    thawed = threading.Event()

    def wait_for_the_timer() -> None:
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()

    def thaw() -> bool:
        thawed.set()
        return True

    _frozen_by(monkeypatch, freezing=wait_for_the_timer, thawing=thaw)
    with closing(HostFreezes(0.01)) as freezes:
        freezes.freeze(MOUNTED)
        assert thawed.is_set(), "it stays frozen until the copy ends"
        with raised("FrozenTooLong"):
            raise freezes.thaw(MOUNTED) or AssertionError("the copy counts")


def test_intent_not_seen_is_an_error_after_the_others(tmp_path: Path) -> None:
    intents, found = Intents(str(tmp_path)), list[Intent]()
    assert [*intents.open()] == []
    seen, hidden = (Intent(volumes.VolumeId(name), identity="7:1@1") for name in ("a", "b"))
    for intent in (seen, hidden):
        intents.note(intent)
    path = lies.Concerns(frozenset({f"{tmp_path}/freezes/{hidden.volume_id}"}), ())
    for asked in lies.failures(
        lambda: found.extend(intents.open()), path, errnos_of=lies.all_errnos
    ):
        assert isinstance(asked.error, errors.CrustError), str(asked.failure)
    assert {*found} == {seen, hidden}
    assert found.count(seen) > found.count(hidden)


async def test_intent_stays_when_the_timers_thaw_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filesystem stays frozen: only the intent says so to the next freeze, and to the next start."""
    failed = threading.Event()

    def thaw() -> bool:
        failed.set()
        raise errors.RuntimeFailed("cannot thaw /mnt")

    _frozen_by(monkeypatch, freezing=bool, thawing=thaw)
    intents = Intents(str(tmp_path))
    assert [*intents.open()] == []
    freezer = Freezer(intents, MemoryBackend(), Guests(), limit_s=0.01)
    with raised("StillFrozen", errors.PeerUnavailable, match="cannot thaw"):
        async with freezer.frozen([MOUNTED]):
            assert await asyncio.to_thread(failed.wait, 20)
    assert [path.name for path in (tmp_path / "freezes").iterdir()] == ["vol-1"]
