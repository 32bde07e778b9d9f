"""The guest agent's requests: what hangs stops nothing else, and equal questions share one run."""

import pytest

from examples.kata.guest.agent import protocol, requests


def _begin(known: requests.Requests, number: int, operation: str, **args: object) -> requests.Run:
    run = known.begin(str(number), operation, args)
    assert run is not None
    return run


def test_hung_statistics_of_one_volume_use_one_slot() -> None:
    known = requests.Requests()
    hung = _begin(known, 0, "usage", volume="v")
    for number in range(1, requests.WAITERS):
        assert known.begin(str(number), "usage", {"volume": "v"}) is None
    with pytest.raises(protocol.Fault, match="wait for usage v"):
        known.begin("late", "usage", {"volume": "v"})
    assert known.end(hung) == [str(number) for number in range(requests.WAITERS)]
    _begin(known, 9, "usage", volume="v")


def test_volume_without_slots_stops_no_other_and_no_thaw() -> None:
    known = requests.Requests()
    hung = [_begin(known, n, "mount", volume="v", timeout_s=n) for n in range(requests.SLOTS)]
    with pytest.raises(protocol.Fault, match="requests of v"):
        known.begin("more", "usage", {"volume": "v"})
    _begin(known, 20, "usage", volume="w")
    _begin(known, 21, "thaw", volume="v")
    _begin(known, 22, "shutdown")
    _begin(known, 23, "container.kill", container="c", signal=9)
    known.end(hung[0])
    _begin(known, 24, "usage", volume="v")


def test_thaw_is_not_answered_by_one_that_began_before_freeze() -> None:
    known = requests.Requests()
    first = _begin(known, 1, "thaw", volume="v")
    assert known.begin("2", "thaw", {"volume": "v"}) is None
    _begin(known, 3, "freeze", volume="v", thaw_after_s=9)
    second = _begin(known, 4, "thaw", volume="v")
    assert (known.end(first), known.end(second)) == (["1", "2"], ["4"])


def test_input_of_a_container_is_never_joined() -> None:
    known = requests.Requests()
    _begin(known, 1, "container.stdin", container="c", data="eA==")
    _begin(known, 2, "container.stdin", container="c", data="eA==")
