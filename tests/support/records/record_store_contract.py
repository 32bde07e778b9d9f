"""What every engine's store of records keeps to: called with a maker of stores that see the same records."""

import threading
from collections.abc import Callable

import pytest

from crust.blockdriver.engines.pool_store import RecordChanged, RecordStore

Maker = Callable[[], RecordStore]
"""A store as a process has it after a start; several of them are several processes, or one after the other."""


def check_saves_and_removes(maker: Maker) -> None:
    """What one store has written another one reads, until it is removed."""
    store = maker()
    assert (store.load("a"), store.ids()) == (None, ())
    store.save("a", b"1", previous=None)
    store.save("b", b"2", previous=None)
    store.save("a", b"3", previous=b"1")
    again = maker()
    assert (again.load("a"), again.load("b"), sorted(again.ids())) == (b"3", b"2", ["a", "b"])
    assert "a" in again.shown("a")
    again.remove("a")
    again.remove("a")
    assert (maker().load("a"), maker().ids()) == (None, ("b",))


def check_refuses_a_stale_write(maker: Maker) -> None:
    """A write that has not read what is there changes nothing."""
    store = maker()
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
    store, ready = maker(), threading.Barrier(8, timeout=30)
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
    store = maker()
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
