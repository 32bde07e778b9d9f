"""What every engine's store of records keeps to: called with a maker of stores that see the same records."""

import threading
from collections.abc import Callable

import pytest

from crust.blockdriver.engines.pool_store import RecordChanged, RecordStore

Maker = Callable[[], RecordStore]
"""A store as a process has it after a start; several of them are several processes, or one after the other."""


def check_saves_and_removes(maker: Maker) -> None:
    """What one store has written another one reads, until it is removed."""
    store = _opened(maker)
    assert (store.load("a"), store.ids(), store.age_s("a")) == (None, (), 0)
    store.save("a", b"1", previous=None)
    store.save("b", b"2", previous=None)
    store.save("a", b"3", previous=b"1")
    again = _opened(maker)
    assert (again.load("a"), again.load("b"), sorted(again.ids())) == (b"3", b"2", ["a", "b"])
    assert 0 <= again.age_s("a") < 3600
    assert "a" in again.shown("a")
    again.remove("a")
    again.remove("a")
    assert (_opened(maker).load("a"), _opened(maker).ids()) == (None, ("b",))


def check_refuses_a_stale_write(maker: Maker) -> None:
    """A write that has not read what is there changes nothing."""
    store = _opened(maker)
    store.save("a", b"1", previous=None)
    for previous in (None, b"0", b"2"):
        with pytest.raises(RecordChanged):
            store.save("a", b"2", previous=previous)
    store.remove("a")
    with pytest.raises(RecordChanged):
        store.save("a", b"2", previous=b"1")
    assert store.load("a") is None


def check_one_of_many_writers_wins(maker: Maker) -> None:
    """Of writers that have read the same one writes."""
    store, ready = _opened(maker), threading.Barrier(8, timeout=30)
    store.save("a", b"0", previous=None)
    outcomes: list[bool] = []

    def write(data: bytes) -> None:
        ready.wait()
        try:
            store.save("a", data, previous=b"0")
        except RecordChanged:
            outcomes.append(False)
        else:
            outcomes.append(True)

    threads = [threading.Thread(target=write, args=[str(n).encode()]) for n in range(1, 9)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(outcomes) == [False] * 7 + [True]


def check_refuses_a_stale_removal(maker: Maker) -> None:
    """A removal that names another record than the stored one removes nothing."""
    store = _opened(maker)
    store.save("a", b"2", previous=None)
    with pytest.raises(RecordChanged):
        store.remove("a", previous=b"1")
    assert store.load("a") == b"2"
    store.remove("a", previous=b"2")
    store.remove("a", previous=b"2")
    assert store.load("a") is None


CHECKS = (
    check_saves_and_removes,
    check_refuses_a_stale_write,
    check_refuses_a_stale_removal,
    check_one_of_many_writers_wins,
)


def _opened(maker: Maker) -> RecordStore:
    store = maker()
    store.open()
    return store
