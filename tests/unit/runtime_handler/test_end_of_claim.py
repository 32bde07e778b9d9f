"""In which order a claim gives back what it has: the lock is free only when the device is."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crust import volumes
from crust.handoff import claims, layout
from crust.runtime_handler import Claim
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
