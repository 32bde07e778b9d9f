"""Why nobody here grows an ext4 that is not mounted: what a resize2fs leaves that is killed between two writes.

It writes the fields of the superblock and their checksum by several calls, so there are moments at which nothing
reads the superblock. If this test fails, resize2fs has changed: measure again (docs/decisions/0038).
"""

import subprocess
from pathlib import Path

import pytest

from crust.host.filesystems import mkfs
from tests.integration.host.conftest import MIB, MakeFile

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

_WRITES_MAX = 32


def _grown(image: str, calls: Path, *, kill_at: int) -> bool:
    """Make an ext4 of one group, double the file, and grow it, killed before a write; whether it was killed."""
    Path(image).write_bytes(b"")
    subprocess.run(["truncate", "--size=64M", image], check=True)
    subprocess.run([*mkfs._MKFS_EXT4, image], check=True, capture_output=True)
    subprocess.run(["truncate", "--size=128M", image], check=True)
    inject = ("-e", "trace=write", "-e", f"inject=write:signal=SIGKILL:when={kill_at}")
    argv = ["strace", "-o", str(calls), *inject, "resize2fs", "-f", image]
    return bool(subprocess.run(argv, capture_output=True, check=False).returncode)


def test_resize2fs_killed_between_two_writes_leaves_an_ext4_that_e2fsck_does_not_open(
    sparse_file: MakeFile, tmp_path: Path
) -> None:
    image = sparse_file(64 * MIB)
    lost = []
    for number in range(1, _WRITES_MAX):
        if not _grown(image, tmp_path / "calls", kill_at=number):
            break
        repaired = subprocess.run(["e2fsck", "-f", "-y", image], capture_output=True, check=False)
        if repaired.returncode >= 8:  # e2fsck itself failed
            lost.append(number)
    else:
        raise AssertionError("the writes have no end")
    assert lost
