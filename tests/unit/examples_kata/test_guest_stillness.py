"""Freeze and thaw in the guest agent, on a filesystem that only counts, with a clock and timers that a test moves."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from examples.kata.guest.agent import filesystems, protocol, stillness

PATH = "/run/volumes/v"


@dataclass
class Kernel:
    """One filesystem, its clock and the timers that were started. `flush_s`: how long a freeze takes."""

    frozen: bool = False
    freeze_s: float = 0
    now_s: float = 0
    calls: list[str] = field(default_factory=list)
    timers: list["Timer"] = field(default_factory=list)
    failures: list[OSError] = field(default_factory=list)

    def flush(self, path: str) -> None:
        self.calls.append("flush")

    def freeze(self, path: str) -> None:
        assert any(each.runs for each in self.timers), "frozen without a watchdog"
        self.calls.append("freeze")
        self.now_s += self.freeze_s
        if self.failures:
            raise self.failures.pop()
        self.frozen = True

    def thaw(self, path: str) -> bool:
        self.calls.append("thaw")
        if self.failures:
            raise self.failures.pop()
        was_frozen, self.frozen = self.frozen, False
        return was_frozen

    def timer(self, after_s: float, call: Callable[[], None]) -> threading.Timer:
        timer = Timer(after_s, call)
        self.timers.append(timer)
        return timer  # type: ignore[return-value] # as much of one as is used


@dataclass
class Timer:
    """`threading.Timer`, fired by the test."""

    after_s: float
    call: Callable[[], None]
    runs: bool = False
    daemon: bool = False

    def start(self) -> None:
        self.runs = True

    def cancel(self) -> None:
        self.runs = False


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    for name in ("flush", "freeze", "thaw"):
        monkeypatch.setattr(filesystems, name, getattr(kernel, name))
    return kernel


@pytest.fixture
def still(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> stillness.Still:
    monkeypatch.setattr(stillness, "_CHANGES_S", 3600)  # who waits is told, and does not find out
    return stillness.Still(kernel.timer, lambda: kernel.now_s)


def freeze(still: stillness.Still, thaw_after_s: float = 10) -> None:
    with still.turn():
        still.wait_until_unmoved()
        still.freeze(PATH, thaw_after_s)


def thaw(still: stillness.Still) -> bool:
    with still.turn():
        return still.thaw(PATH)


@contextlib.contextmanager
def waiting(still: stillness.Still, work: Callable[[], None]) -> Iterator[None]:
    """`work` runs in a thread, and waits for its turn as the block begins; it has ended when the block is left."""
    waits = threading.Event()
    wait_for = still.lock.wait_for

    def noted(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if not predicate():
            waits.set()
        return wait_for(predicate, timeout)

    still.lock.wait_for = noted  # type: ignore[assignment,method-assign]
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert waits.wait(30), "it did not wait"
    yield
    thread.join(30)
    assert not thread.is_alive()


def test_a_freeze_flushes_first_and_has_its_watchdog_before_it_begins(
    kernel: Kernel, still: stillness.Still
) -> None:
    freeze(still, 10)
    assert kernel.calls == ["flush", "freeze"]
    assert [(each.after_s, each.runs, each.daemon) for each in kernel.timers] == [(10, True, True)]


def test_a_thaw_in_time_tells_the_truth_and_ends_the_watchdog(
    kernel: Kernel, still: stillness.Still
) -> None:
    freeze(still)
    assert thaw(still) is True
    assert not kernel.timers[0].runs
    assert thaw(still) is False


def test_a_thaw_after_the_watchdog_tells_the_truth(kernel: Kernel, still: stillness.Still) -> None:
    freeze(still)
    kernel.timers[0].call()
    assert not kernel.frozen
    assert thaw(still) is False


def test_a_repetition_begins_the_time_anew_and_the_old_watchdog_does_nothing_more(
    kernel: Kernel, still: stillness.Still
) -> None:
    """It may have fired already, and waited for the lock that the repetition held."""
    freeze(still)
    freeze(still, 20)
    assert [(each.after_s, each.runs) for each in kernel.timers] == [(10, False), (20, True)]
    kernel.timers[0].call()
    assert kernel.frozen
    kernel.timers[1].call()
    assert not kernel.frozen


def test_a_repetition_flushes_nothing(kernel: Kernel, still: stillness.Still) -> None:
    freeze(still)
    freeze(still)
    assert kernel.calls == ["flush", "freeze", "freeze"]


def test_a_freeze_that_took_longer_than_its_time_is_undone_and_has_failed(
    kernel: Kernel, still: stillness.Still
) -> None:
    kernel.freeze_s = 11
    with pytest.raises(protocol.Fault, match="timeout"):
        freeze(still, 10)
    assert not kernel.frozen
    assert not kernel.timers[0].runs


def test_a_watchdog_whose_thaw_fails_tries_again(kernel: Kernel, still: stillness.Still) -> None:
    freeze(still)
    kernel.failures = [OSError(5, "EIO")]
    kernel.timers[0].call()
    assert kernel.frozen
    kernel.timers[1].call()
    assert not kernel.frozen
    assert not kernel.timers[1].runs


def test_a_watchdog_of_a_volume_that_is_gone_ends(kernel: Kernel, still: stillness.Still) -> None:
    freeze(still)
    kernel.failures = [FileNotFoundError(2, PATH)]
    kernel.timers[0].call()
    assert len(kernel.timers) == 1


def test_a_thaw_that_fails_keeps_the_watchdog(kernel: Kernel, still: stillness.Still) -> None:
    freeze(still)
    kernel.failures = [OSError(5, "EIO")]
    with pytest.raises(OSError, match="EIO"):
        thaw(still)
    assert kernel.timers[0].runs


def test_what_could_not_be_frozen_says_so(kernel: Kernel, still: stillness.Still) -> None:
    kernel.failures = [OSError(95, "EOPNOTSUPP")]
    with pytest.raises(OSError, match="EOPNOTSUPP"):
        freeze(still)
    assert not kernel.frozen
    assert not any(each.runs for each in kernel.timers)


@pytest.mark.parametrize("in_time", [True, False], ids=["thawed", "watchdog"])
def test_what_changes_the_filesystem_waits_for_the_thaw_outside_of_the_kernel(
    kernel: Kernel, still: stillness.Still, *, in_time: bool
) -> None:
    def grow() -> None:
        with still.moving():
            kernel.calls.append("grow")

    freeze(still)
    with waiting(still, grow):
        kernel.calls.clear()
        if in_time:
            assert thaw(still) is True
        else:
            kernel.timers[0].call()
    assert kernel.calls == ["thaw", "grow"]


def test_a_freeze_waits_for_what_changes_the_filesystem_and_an_unmount_does_not(
    kernel: Kernel, still: stillness.Still
) -> None:
    with contextlib.ExitStack() as ending, still.moving():
        ending.enter_context(waiting(still, lambda: freeze(still)))
        with still.lock:
            assert still.thaw(PATH) is False
        kernel.calls.append("grown")
    assert kernel.calls == ["thaw", "grown", "flush", "freeze"]


def test_a_thaw_is_not_overtaken_by_a_freeze_that_waits(
    kernel: Kernel, still: stillness.Still
) -> None:
    """Its caller gave it up, and will not thaw again."""
    told: list[bool] = []
    thawing = threading.Thread(target=lambda: told.append(thaw(still)), daemon=True)
    with contextlib.ExitStack() as ending, still.moving():
        ending.enter_context(waiting(still, lambda: freeze(still)))
        thawing.start()
        thawing.join(0.05)
    thawing.join(30)
    assert told == [True]
    assert not kernel.frozen


def test_a_change_that_does_not_end_refuses_the_freeze(
    kernel: Kernel, still: stillness.Still, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stillness, "_CHANGES_S", 0.001)
    with still.moving(), pytest.raises(protocol.Fault, match="busy"):
        freeze(still)
    assert kernel.calls == []


def test_a_change_that_fails_keeps_no_freeze_away(kernel: Kernel, still: stillness.Still) -> None:
    with contextlib.suppress(OSError), still.moving():
        raise OSError(28, "ENOSPC")
    freeze(still)
    assert kernel.frozen
