"""Freeze and thaw in the guest agent, on a fake filesystem, with a clock and timers that the test controls."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from examples.kata.guest.agent import filesystems, freeze, protocol

PATH = "/run/volumes/v"


@dataclass
class Kernel:
    """One filesystem, its clock and the started timers. `freeze_s`: how long a freeze takes."""

    frozen: bool = False
    freeze_s: float = 0
    now_s: float = 0
    calls: list[str] = field(default_factory=list)
    timers: list["Timer"] = field(default_factory=list)
    failures: list[OSError] = field(default_factory=list)

    def flush(self, path: str) -> None:
        self.calls.append("flush")

    def freeze(self, path: str) -> None:
        assert any(timer.runs for timer in self.timers), "frozen without a watchdog"
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
def volume_freeze(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> freeze.VolumeFreeze:
    # waiting ends by notification and never by this timeout
    monkeypatch.setattr(freeze, "_CHANGE_TIMEOUT_S", 3600)
    return freeze.VolumeFreeze(kernel.timer, lambda: kernel.now_s)


def freeze_volume(volume_freeze: freeze.VolumeFreeze, thaw_after_s: float = 10) -> None:
    with volume_freeze.serialized():
        volume_freeze.wait_for_change()
        volume_freeze.freeze(PATH, thaw_after_s)


def thaw_volume(volume_freeze: freeze.VolumeFreeze) -> bool:
    with volume_freeze.serialized():
        return volume_freeze.thaw(PATH)


@contextlib.contextmanager
def waiting(volume_freeze: freeze.VolumeFreeze, work: Callable[[], None]) -> Iterator[None]:
    """Run `work` in a thread; it waits for the lock when the block begins, and has ended when the block is left."""
    waits = threading.Event()
    wait_for = volume_freeze.lock.wait_for

    def noted(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if not predicate():
            waits.set()
        return wait_for(predicate, timeout)

    volume_freeze.lock.wait_for = noted  # type: ignore[assignment,method-assign]
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert waits.wait(30), "it did not wait"
    yield
    thread.join(30)
    assert not thread.is_alive()


def test_freeze_flushes_and_starts_watchdog_first(
    kernel: Kernel, volume_freeze: freeze.VolumeFreeze
) -> None:
    freeze_volume(volume_freeze, 10)
    assert kernel.calls == ["flush", "freeze"]
    assert [(timer.after_s, timer.runs, timer.daemon) for timer in kernel.timers] == [
        (10, True, True)
    ]


def test_thaw_in_time_returns_true_and_stops_the_watchdog(
    kernel: Kernel, volume_freeze: freeze.VolumeFreeze
) -> None:
    freeze_volume(volume_freeze)
    assert thaw_volume(volume_freeze) is True
    assert not kernel.timers[0].runs
    assert thaw_volume(volume_freeze) is False


def test_thaw_after_the_watchdog_returns_false(
    kernel: Kernel, volume_freeze: freeze.VolumeFreeze
) -> None:
    freeze_volume(volume_freeze)
    kernel.timers[0].call()
    assert not kernel.frozen
    assert thaw_volume(volume_freeze) is False


def test_repeated_freeze_restarts_the_timeout_and_disarms_the_old_watchdog(
    kernel: Kernel, volume_freeze: freeze.VolumeFreeze
) -> None:
    """The old watchdog may have fired already and waited for the lock that the repeated freeze held."""
    freeze_volume(volume_freeze)
    freeze_volume(volume_freeze, 20)
    assert [(timer.after_s, timer.runs) for timer in kernel.timers] == [(10, False), (20, True)]
    kernel.timers[0].call()
    assert kernel.frozen
    kernel.timers[1].call()
    assert not kernel.frozen


def test_repeated_freeze_does_not_flush(kernel: Kernel, volume_freeze: freeze.VolumeFreeze) -> None:
    freeze_volume(volume_freeze)
    freeze_volume(volume_freeze)
    assert kernel.calls == ["flush", "freeze", "freeze"]


def test_freeze_slower_than_its_timeout_is_undone_and_fails(
    kernel: Kernel, volume_freeze: freeze.VolumeFreeze
) -> None:
    kernel.freeze_s = 11
    with pytest.raises(protocol.Fault, match="timeout"):
        freeze_volume(volume_freeze, 10)
    assert not kernel.frozen
    assert not kernel.timers[0].runs


def test_watchdog_retries_a_failed_thaw(kernel: Kernel, volume_freeze: freeze.VolumeFreeze) -> None:
    freeze_volume(volume_freeze)
    kernel.failures = [OSError(5, "EIO")]
    kernel.timers[0].call()
    assert kernel.frozen
    kernel.timers[1].call()
    assert not kernel.frozen
    assert not kernel.timers[1].runs


def test_watchdog_of_an_unmounted_volume_ends(
    kernel: Kernel, volume_freeze: freeze.VolumeFreeze
) -> None:
    freeze_volume(volume_freeze)
    kernel.failures = [FileNotFoundError(2, PATH)]
    kernel.timers[0].call()
    assert len(kernel.timers) == 1


def test_failed_thaw_keeps_the_watchdog(kernel: Kernel, volume_freeze: freeze.VolumeFreeze) -> None:
    freeze_volume(volume_freeze)
    kernel.failures = [OSError(5, "EIO")]
    with pytest.raises(OSError, match="EIO"):
        thaw_volume(volume_freeze)
    assert kernel.timers[0].runs


def test_failed_freeze_raises_and_stops_the_watchdog(
    kernel: Kernel, volume_freeze: freeze.VolumeFreeze
) -> None:
    kernel.failures = [OSError(95, "EOPNOTSUPP")]
    with pytest.raises(OSError, match="EOPNOTSUPP"):
        freeze_volume(volume_freeze)
    assert not kernel.frozen
    assert not any(timer.runs for timer in kernel.timers)


@pytest.mark.parametrize("in_time", [True, False], ids=["thawed", "watchdog"])
def test_change_waits_for_thaw_in_user_space(
    kernel: Kernel, volume_freeze: freeze.VolumeFreeze, *, in_time: bool
) -> None:
    def grow() -> None:
        with volume_freeze.changing():
            kernel.calls.append("grow")

    freeze_volume(volume_freeze)
    with waiting(volume_freeze, grow):
        kernel.calls.clear()
        if in_time:
            assert thaw_volume(volume_freeze) is True
        else:
            kernel.timers[0].call()
    assert kernel.calls == ["thaw", "grow"]


def test_freeze_waits_for_a_running_change_and_unmount_does_not(
    kernel: Kernel, volume_freeze: freeze.VolumeFreeze
) -> None:
    with contextlib.ExitStack() as ending, volume_freeze.changing():
        ending.enter_context(waiting(volume_freeze, lambda: freeze_volume(volume_freeze)))
        with volume_freeze.lock:
            assert volume_freeze.thaw(PATH) is False
        kernel.calls.append("grown")
    assert kernel.calls == ["thaw", "grown", "flush", "freeze"]


def test_thaw_waits_for_a_pending_freeze(
    kernel: Kernel, volume_freeze: freeze.VolumeFreeze
) -> None:
    """The freeze's caller has given up and will not thaw again."""
    answers: list[bool] = []
    thawing = threading.Thread(
        target=lambda: answers.append(thaw_volume(volume_freeze)), daemon=True
    )
    with contextlib.ExitStack() as ending, volume_freeze.changing():
        ending.enter_context(waiting(volume_freeze, lambda: freeze_volume(volume_freeze)))
        thawing.start()
        thawing.join(0.05)
    thawing.join(30)
    assert answers == [True]
    assert not kernel.frozen


def test_freeze_is_refused_when_a_change_does_not_end(
    kernel: Kernel, volume_freeze: freeze.VolumeFreeze, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freeze, "_CHANGE_TIMEOUT_S", 0.001)
    with volume_freeze.changing(), pytest.raises(protocol.Fault, match="busy"):
        freeze_volume(volume_freeze)
    assert kernel.calls == []


def test_failed_change_does_not_block_freeze(
    kernel: Kernel, volume_freeze: freeze.VolumeFreeze
) -> None:
    with contextlib.suppress(OSError), volume_freeze.changing():
        raise OSError(28, "ENOSPC")
    freeze_volume(volume_freeze)
    assert kernel.frozen
