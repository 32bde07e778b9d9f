"""crust.handoff.watch on a real inotify: no change is missed, even if events are lost.

The time between scans is set to an hour, so that only events, the overflow and the root's return can cause a hint; a
test that gets none runs into its deadline.
"""

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from watchdog.observers import inotify_c

from crust.core import errors
from crust.handoff import claims, entry, layout
from crust.handoff.claims import ClaimLock
from crust.handoff.entry import Entry
from crust.handoff.layout import Layout, UntrustedDirectory
from crust.handoff.store import Store
from crust.handoff.watch import RENAMES, Kinds, Watch
from crust.runtime_handler.blocking import resolve_source
from tests.support.raised import raised
from tests.support.records.records import TARGET, a_record

HOUR_S = 3600.0
DEADLINE_S = 60.0
QUEUE_EVENTS = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(f"{tmp_path}/run/volumes")
    made.open()
    return made


@pytest.fixture
async def looking(store: Store) -> AsyncIterator[Watch]:
    async with Watch(store.root, rescan_s=HOUR_S) as made:
        yield made


async def _scans(looking: Watch) -> AsyncIterator[list[Entry]]:
    """The entries after each hint, if they differ from those before."""
    reader, known = entry.DirectoryReader(Layout(looking.root)), dict[str, Entry]()
    yielded: list[Entry] | None = None
    async for _ in looking:
        seen = await asyncio.to_thread(reader.look)
        known = {
            name: latest for name, latest in {**known, **seen.entries}.items() if name in seen.names
        }
        if list(known.values()) != yielded:
            yielded = list(known.values())
            yield yielded


async def _next(scans: AsyncIterator[list[Entry]]) -> list[Entry]:
    async with asyncio.timeout(DEADLINE_S):
        return await anext(scans)


def _unpublish(store: Store) -> None:
    with store.begin_removal(TARGET) as unpublish:
        unpublish.complete()


async def test_first_hint_comes_at_once_even_without_entries(store: Store) -> None:
    async with Watch(store.root, rescan_s=HOUR_S) as empty:
        assert await _next(_scans(empty)) == []
    entry = store.write(a_record())
    async with Watch(store.root, rescan_s=HOUR_S) as full:
        assert await _next(_scans(full)) == [entry]


@pytest.mark.spec("H-31")
async def test_each_change_of_an_entry_is_a_hint(store: Store, looking: Watch) -> None:
    scans = _scans(looking)
    await _next(scans)
    published = store.write(a_record())
    assert await _next(scans) == [published]
    rewritten = store.rewrite(published, a_record(capacity_bytes=1).mount)
    assert await _next(scans) == [rewritten]
    paths = store.layout.entry(TARGET)
    with claims.ClaimLock.acquire(paths, TARGET):
        state = claims.State.MOUNTED
        claims.write(
            paths, claims.Claim("s", "kata", state, "", 1, a_record().crust.published_at, live=True)
        )
        (claimed,) = await _next(scans)
        assert claimed.live
        claims.remove(paths)
        (released,) = await _next(scans)
        assert released.claim is not None
        assert released.claim.sandbox_id == ""
    _unpublish(store)
    assert await _next(scans) == []


class CountingWatch(Watch):
    """Counts the hints before they coalesce."""

    def __init__(self, root: str, **kinds: Kinds) -> None:
        super().__init__(root, rescan_s=HOUR_S, **kinds)
        self.hints = 0

    def notify(self) -> None:
        self.hints += 1
        super().notify()


async def test_hidden_names_cause_no_hint(store: Store) -> None:
    async with CountingWatch(store.root) as looking:
        await anext(aiter(looking))
        for _ in range(3):
            os.mkdir(f"{store.root}/.new-x")
            os.utime(f"{store.root}/.new-x")
            os.rename(f"{store.root}/.new-x", f"{store.root}/.gone-x")
            os.rmdir(f"{store.root}/.gone-x")
        # events keep their order: when its hint is there, all others were handled
        store.write(a_record())
        async with asyncio.timeout(DEADLINE_S):
            await anext(aiter(looking))
        assert looking.hints == 1


async def test_claim_is_no_hint_where_renames_are_asked_for(store: Store) -> None:
    """A runtime's daemon that claims many volumes would scan beside each claim."""
    store.write(a_record())
    async with CountingWatch(store.root, kinds=RENAMES) as looking:
        await anext(aiter(looking))
        claims.touch(store.layout.entry(TARGET))
        _unpublish(store)  # events keep their order
        async with asyncio.timeout(DEADLINE_S):
            await anext(aiter(looking))
        assert looking.hints == 1


async def test_many_events_coalesce_into_one_hint(store: Store, looking: Watch) -> None:
    scans = _scans(looking)
    await _next(scans)
    for number in range(50):
        store.write(a_record(f"/pods/{number}"))
    while len(await _next(scans)) < 50:
        pass


@pytest.mark.spec("H-30")
@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
async def test_queue_overflow_causes_a_hint_and_no_change_is_lost(
    store: Store, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level)
    caplog.handler.setLevel(logging.NOTSET)
    async with Watch(store.root, rescan_s=HOUR_S) as looking:
        scans = _scans(looking)
        await _next(scans)
        for name in (".a", ".b"):
            os.mkdir(f"{store.root}/{name}")
        with _stalled_reader(looking):
            # Two hidden names in turn: equal neighbours would be merged, and other names would cause a hint.
            for number in range(2 * QUEUE_EVENTS):
                os.utime(f"{store.root}/{'.a' if number % 2 else '.b'}")
            entry = store.write(a_record())
        assert await _next(scans) == [entry]
    assert any("overflow" in record.message for record in caplog.records)


def _stalled_reader(looking: Watch) -> Any:
    """Keep watchdog's thread from reading the kernel's queue, as a long pause of the process would."""
    observer: Any = looking._observer
    return observer._inotify_fd._lock


async def test_root_that_was_made_again_is_watched(store: Store, looking: Watch) -> None:
    scans = _scans(looking)
    entry = store.write(a_record())
    assert await _next(scans) == [entry]
    for _ in range(3):
        shutil.rmtree(store.root)
        assert await _next(scans) == []
        store.open()
        looking.notify()  # in place of the periodic scan: a missing directory cannot be watched
        await _until_watched(looking)
        entry = store.write(a_record())
        assert await _next(scans) == [entry]


async def test_new_root_with_an_old_inode_is_watched(store: Store, looking: Watch) -> None:
    await anext(aiter(looking))
    for _ in range(3):
        os.rmdir(store.root)
        store.open()
        await _until_watched(looking)
        store.write(a_record())
        async with asyncio.timeout(DEADLINE_S):
            await anext(aiter(looking))
        _unpublish(store)
        await _until_watched(looking)


async def test_entries_removed_before_their_events_do_not_stop_watch(
    store: Store, looking: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recursive watch would watch each of them, and meet what is gone; this one watches the root alone."""
    scans = _scans(looking)
    await _next(scans)
    watched: list[bytes] = []
    real = inotify_c.inotify_add_watch

    def add(fd: int, path: bytes, mask: int) -> int:
        watched.append(path)
        return real(fd, path, mask)

    monkeypatch.setattr(inotify_c, "inotify_add_watch", add)
    for _ in range(3):
        with _stalled_reader(looking):
            for number in range(100):
                os.makedirs(f"{store.root}/{number}/below")
                os.rename(f"{store.root}/{number}", f"{store.root}/moved")
                shutil.rmtree(f"{store.root}/moved")
        entry = store.write(a_record())
        assert await _next(scans) == [entry]
        _unpublish(store)
        assert await _next(scans) == []
    assert watched == []


async def test_root_that_vanishes_before_the_watch_is_watched_later(
    store: Store, looking: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = _scans(looking)
    await _next(scans)
    real = inotify_c.inotify_add_watch
    vanished: list[int] = []

    def add(fd: int, path: bytes, mask: int) -> int:
        if not vanished:
            shutil.rmtree(store.root)
            vanished.append(fd)
        return real(fd, path, mask)

    monkeypatch.setattr(inotify_c, "inotify_add_watch", add)
    shutil.rmtree(store.root)
    store.open()
    while not vanished:
        await _until_watched(looking)
    store.open()
    looking.notify()  # in place of the periodic scan
    await _until_watched(looking)
    entry = store.write(a_record())
    assert await _next(scans) == [entry]


async def _until_watched(looking: Watch) -> None:
    # The hint makes the watch follow the new root before the next scan; this is that scan's first half.
    async with asyncio.timeout(DEADLINE_S):
        await anext(aiter(looking))


async def test_root_created_later_is_found_by_the_periodic_scan(tmp_path: Path) -> None:
    store = Store(f"{tmp_path}/later/volumes")
    async with Watch(store.root, rescan_s=0.01) as early:
        scans = _scans(early)
        await _next(scans)
        store.open()
        entry = store.write(a_record())
        assert await _next(scans) == [entry]


async def test_death_of_a_sandbox_is_found_by_the_periodic_scan(store: Store) -> None:
    store.write(a_record())
    lock = claims.ClaimLock.acquire(store.layout.entry(TARGET), TARGET)
    async with Watch(store.root, rescan_s=0.01) as looking:
        scans = _scans(looking)
        assert (await _next(scans))[0].live
        lock.close()
        assert not (await _next(scans))[0].live


async def test_leaving_the_watch_leaves_no_thread_and_no_handler(store: Store) -> None:
    threads, handlers = set(threading.enumerate()), list(logging.getLogger("watchdog").handlers)
    async with Watch(store.root) as looking:
        await anext(aiter(looking))
    left = {
        thread.name
        for thread in set(threading.enumerate()) - threads
        if not thread.name.startswith(("asyncio_", "hop-"))  # of the pools, which stay
    }
    assert left == set()
    assert logging.getLogger("watchdog").handlers == handlers
    looking.notify()


pytestmark = pytest.mark.root

STRANGER = 65534


@pytest.fixture
def trusted(tmp_path: Path) -> Store:
    made = Store(f"{tmp_path}/volumes")
    made.open()
    made.write(a_record())
    return made


@pytest.fixture
def paths(trusted: Store) -> layout.EntryPaths:
    return trusted.layout.entry(TARGET)


@pytest.mark.spec("H-4")
@pytest.mark.parametrize("path_of", [lambda paths: paths.record, lambda paths: paths.directory])
def test_directory_or_file_of_another_user_fails_every_reader(
    trusted: Store, paths: layout.EntryPaths, path_of: Callable[[layout.EntryPaths], str]
) -> None:
    os.chown(path_of(paths), STRANGER, STRANGER)
    (entry,) = trusted.scan()
    assert isinstance(entry.error, errors.Refused)
    assert str(STRANGER) in str(entry.error)
    for attempt in (
        lambda: trusted.write(a_record()),
        lambda: resolve_source(trusted.root, TARGET.text),
    ):
        with pytest.raises(errors.Refused):
            attempt()
    assert os.path.exists(paths.record)


def test_lock_of_another_user_is_not_used(trusted: Store, paths: layout.EntryPaths) -> None:
    Path(paths.claim).write_text("{}")
    os.chown(paths.claim, STRANGER, STRANGER)
    with pytest.raises(errors.Refused):
        claims.read(paths)
    os.chown(paths.claim_lock, STRANGER, STRANGER)
    with raised("UntrustedLock"):
        ClaimLock.acquire(paths, TARGET)
    with raised("UntrustedLock"):
        trusted.begin_removal(TARGET)


def test_open_refuses_a_root_of_another_user(trusted: Store) -> None:
    os.chown(trusted.root, STRANGER, STRANGER)
    with pytest.raises((UntrustedDirectory, errors.Refused), match=str(STRANGER)):
        trusted.open()
