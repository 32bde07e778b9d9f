"""A claim as an author of a runtime holds it, without a device: its end, its reason, and the order of both."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.handoff import claims, layout
from crust.handoff.store import Store
from crust.runtime_handler.blocking import Claim, ClaimLost, State, process_of
from tests.support.records.records import TARGET, a_record


def _claim(store: Store) -> Claim:
    paths = layout.Layout(store.root).entry(TARGET)
    lock = claims.ClaimLock.acquire(paths, TARGET)
    lock.settle()
    return Claim(paths, a_record(), volumes.SandboxId("box"), lock=lock)


def _left(store: Store) -> claims.Claim | None:
    entry = store.read(TARGET)
    assert entry is not None
    return entry.claim


@pytest.mark.spec("H-24")
def test_claim_names_hypervisor_that_starts_after_it(store: Store) -> None:
    claim, process = _claim(store), process_of(os.getppid())
    claim.report(State.CLAIMED)
    before = _left(store)
    assert before is not None
    assert (before.pid, before.process) == (os.getpid(), None)
    claim.report_mounted(process)
    claim.report_mounted()
    after = _left(store)
    assert after is not None
    assert (after.state, after.pid, after.process) == (State.MOUNTED, process.pid, process)
    with pytest.raises(ClaimLost, match=f"names process {process.pid}"):
        claim.report_mounted(process_of(os.getpid()))
    assert _left(store) == after
    claim.release()


@pytest.mark.spec("H-29")
@pytest.mark.parametrize("handed_over", [False, True])
def test_release_with_error_leaves_its_reason(store: Store, *, handed_over: bool) -> None:
    claim = _claim(store)
    if handed_over:
        claim.close()
    claim.release(error="the kernel has no xfs")
    left = _left(store)
    assert left is not None
    assert (left.state, left.error, left.live) == (State.ERROR, "the kernel has no xfs", False)
    _claim(store).release()  # the next claim removes it
    assert _left(store) is None


def test_release_without_space_for_its_reason_gives_volume_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hypervisor runs on: what claim.json said before would refuse every other sandbox."""
    paths = layout.Layout(store.root).entry(TARGET)
    lock, sandbox = claims.ClaimLock.acquire(paths, TARGET), volumes.SandboxId("box")
    claim = Claim(paths, a_record(), sandbox, lock=lock, process=process_of(os.getpid()))
    claim.report(State.CLAIMED)

    def full(*_: object) -> None:
        raise errors.Exhausted("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(claims, "write", full)
        with pytest.raises(errors.Exhausted):
            claim.release(error="the kernel has no xfs")
    assert _left(store) is None
    with claims.ClaimLock.acquire(paths, TARGET) as next_lock:
        next_lock.check_ended(TARGET)


def test_failing_block_leaves_error_without_foreign_text(store: Store) -> None:
    for error, reason in [
        (errors.NotReady("too slow"), "too slow"),
        (ValueError("pw"), "ValueError"),
    ]:
        with contextlib.suppress(type(error)), _claim(store):
            raise error
        left = _left(store)
        assert left is not None
        assert reason in left.error
        assert "pw" not in left.error


NEVER_OPEN = 10**6


class ObservedLock(claims.ClaimLock):
    """Notes whether the device is open when the lock is closed."""

    device_fd = -1
    closed_before: bool | None = None

    def close(self) -> None:
        if self.fd >= 0:
            self.closed_before = not os.path.exists(f"/proc/self/fd/{self.device_fd}")
        super().close()


@pytest.mark.parametrize("end", [Claim.close, Claim.release])
def test_device_is_closed_before_its_lock(tmp_path: Path, end: Callable[[Claim], None]) -> None:
    paths = layout.Layout(str(tmp_path)).entry(TARGET)
    lock = ObservedLock(os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT), paths)
    lock.device_fd = os.open(tmp_path / "device", os.O_RDWR | os.O_CREAT)
    sandbox = volumes.SandboxId("sandbox-1")
    claim = Claim(paths, a_record(), sandbox, lock=lock, device_fd=lock.device_fd)
    end(claim)
    assert lock.closed_before is True
    assert (lock.fd, claim.fds) == (-1, ())


def test_lock_is_closed_though_the_device_is_not(tmp_path: Path) -> None:
    lock = ObservedLock(
        os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT),
        layout.Layout(str(tmp_path)).entry(TARGET),
    )
    sandbox = volumes.SandboxId("sandbox-1")
    claim = Claim(lock.paths, a_record(), sandbox, lock=lock, device_fd=NEVER_OPEN)
    with pytest.raises(OSError, match="Bad file descriptor"):
        claim.close()
    assert lock.fd == -1
