"""Filesystems that another program has frozen (fsfreeze(8)): they stay so when that has ended."""

import subprocess

from crust.blockdriver.host import fsfreeze


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
