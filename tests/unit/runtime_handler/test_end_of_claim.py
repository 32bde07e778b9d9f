"""The end of a claim: the order in which it gives back what it has, and who may take it again."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.core import volumes
from crust.handoff import claims, layout
from crust.handoff.store import Store
from crust.runtime_handler import Claim, ClaimLost, reclaim_volume
from tests.support.records.records import TARGET, a_record

NEVER_OPEN = 10**6


class ObservedLock(claims.ClaimLock):
    """Notes whether the device is open when the lock is closed."""

    device_fd = -1
    closed_before: bool | None = None

    def close(self) -> None:
        """See `ClaimLock`."""
        if self.fd >= 0:
            self.closed_before = not os.path.exists(f"/proc/self/fd/{self.device_fd}")
        super().close()


@pytest.mark.parametrize("end", [Claim.hand_over, Claim.release])
def test_device_is_closed_before_the_lock_that_says_that_it_is_used(
    tmp_path: Path, end: Callable[[Claim], None]
) -> None:
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
        claim.hand_over()
    assert lock.fd == -1


@pytest.mark.spec("H-46")
def test_claim_of_another_handlers_sandbox_is_not_reclaimed(tmp_path: Path) -> None:
    """Two runtimes may give their sandboxes the same id."""
    store = Store(f"{tmp_path}/volumes")
    store.open()
    record = store.publish(a_record()).require()
    paths = store.layout.entry(TARGET)
    dead = claims.Claim(
        "sandbox-1", "other", claims.State.MOUNTED, "", 1, record.published_at, live=False
    )
    claims.write(paths, dead)
    with pytest.raises(ClaimLost, match="sandbox-1"):
        reclaim_volume(store.root, TARGET, volumes.SandboxId("sandbox-1"), record.handler)
    assert claims.read(paths) == dead
