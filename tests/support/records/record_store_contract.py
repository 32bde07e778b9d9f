"""What every engine's store of records keeps to: called with a maker of stores that see the same records."""

import threading
from collections.abc import Callable

import pytest

from crust.blockdriver.engines.pool_access import RecordChanged, RecordStore

Maker = Callable[[], RecordStore]
"""A store as a process has it after a start; several of them are several processes, or one after the other."""
Make = Callable[[str, bytes], None]
"""Makes a record, as it comes with what it describes."""


def check_saves(maker: Maker, make: Make) -> None:
    """What one store has written another one reads."""
    store = maker()
    assert (store.load("a"), store.ids()) == (None, ())
    make("a", b"1")
    make("b", b"2")
    store.save("a", b"3", previous=b"1")
    again = maker()
    assert (again.load("a"), again.load("b"), sorted(again.ids())) == (b"3", b"2", ["a", "b"])
    assert "a" in again.shown("a")


def check_refuses_a_stale_write(maker: Maker, make: Make) -> None:
    """A write that has not read what is there changes nothing, and makes nothing."""
    store = maker()
    make("a", b"1")
    for previous in (b"0", b"2"):
        with pytest.raises(RecordChanged):
            store.save("a", b"2", previous=previous)
    assert store.load("a") == b"1"
    with pytest.raises(RecordChanged):
        store.save("b", b"2", previous=b"1")
    assert store.load("b") is None


def check_one_of_many_writers_wins(maker: Maker, make: Make) -> None:
    """Of writers that have read the same one writes."""
    store, ready = maker(), threading.Barrier(8, timeout=30)
    make("a", b"0")
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
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 7 + [True]


CHECKS = (check_saves, check_refuses_a_stale_write, check_one_of_many_writers_wins)
