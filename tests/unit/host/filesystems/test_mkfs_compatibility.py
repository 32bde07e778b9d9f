"""The trial mount of a new filesystem."""

import os
import threading
from contextlib import nullcontext
from unittest.mock import AsyncMock

import pytest

from crust.host.block import loop
from crust.host.filesystems import mkfs, mkfs_compatibility
from crust.host.mounts import detached_mount


async def test_the_trial_mount_is_unmounted_in_a_thread_and_not_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its unmount is the close of a descriptor, and waits for the disk."""
    root, other = os.pipe()
    closed_by = []
    close = os.close

    def watched(descriptor: int) -> None:
        if descriptor == root:
            closed_by.append(threading.current_thread())
        close(descriptor)

    monkeypatch.setattr(detached_mount, "open_root", lambda *_: root)
    monkeypatch.setattr(os, "close", watched)
    monkeypatch.setattr(loop, "scratch", lambda _: nullcontext("/dev/null"))
    monkeypatch.setattr(mkfs, "make", AsyncMock())
    assert await mkfs_compatibility.MkfsCompatibility()._is_mountable("ext4", ())
    assert len(closed_by) == 1
    assert closed_by[0] is not threading.main_thread()
    close(other)
