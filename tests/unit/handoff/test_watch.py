"""The watched directory: its identity is asked at each hint, and one that is not seen ends nothing."""

import errno
from pathlib import Path

import pytest

from crust.core import errors
from crust.handoff.watch import Watch
from tests.support.faults import lies


async def test_root_that_is_not_seen_stays_watched(tmp_path: Path) -> None:
    async with Watch(str(tmp_path), rescan_s=0.01) as watch:
        await anext(watch)
        watched = watch._watched
        root = lies.Concerns(frozenset({str(tmp_path)}), ())
        with lies.failing(root, lies.Failure(0, errno.EIO)), pytest.raises(errors.RuntimeFailed):
            await anext(watch)
        await anext(watch)
        assert watch._watched is watched
