"""Filesystems that stay frozen: of another program (fsfreeze(8)), or of an ended driver until it recovers."""

import asyncio
import subprocess

from crust.blockdriver.host import fsfreeze
from crust.blockdriver.snapshots.freezer import Freezer


def freeze(mountpoint: str) -> bool:
    """Freeze it; False if it is frozen already."""
    done = subprocess.run(["fsfreeze", "-f", mountpoint], check=False, capture_output=True)
    assert done.returncode == 0 or b"busy" in done.stderr, done.stderr
    return done.returncode == 0


def is_frozen(mountpoint: str) -> bool:
    if not freeze(mountpoint):
        return True
    fsfreeze.thaw(mountpoint)
    return False


async def recovered(freezer: Freezer) -> None:
    """Run the driver's recovery until each thaw that is left has ended, which it repeats itself."""
    recovering = asyncio.create_task(freezer.keep_recovering())
    await asyncio.sleep(0)  # it begins: its thaws are tasks now
    thaws = [task for task in asyncio.all_tasks() if task.get_name().startswith("thaw ")]
    await asyncio.gather(*thaws)
    recovering.cancel()
    await asyncio.wait([recovering])
