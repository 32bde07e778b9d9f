"""What a mkfs leaves that is killed at any of its writes: no complete filesystem, or one that its checker accepts.

The driver clears a device after an interrupted mkfs only because of this, so it is held against the programs that are
installed. strace kills them: at the n-th system call that writes or syncs, before the call is executed.
"""

import re
import subprocess
from pathlib import Path

import pytest

from crust.blockdriver.records.models import ContentRecord
from crust.host.block import signatures
from crust.host.filesystems import format_decision, mkfs, superblocks, supported
from tests.integration.host.conftest import MIB, Attach

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

_SIZES = {"ext4": 32 * MIB, "xfs": 300 * MIB, "btrfs": 128 * MIB}
_CHECK = {
    "ext4": ("e2fsck", "-f", "-n"),
    "xfs": ("xfs_repair", "-n"),
    "btrfs": ("btrfs", "check", "--readonly"),
}
_WRITES = "write,pwrite64,writev,pwritev,fsync,fdatasync,sync_file_range,ioctl,fallocate"
_MOMENTS = 24
_UUID = "11111111-0000-4000-8000-000000000000"


@pytest.mark.parametrize("fs_type", supported.SUPPORTED)
def test_mkfs_killed_at_a_write_leaves_nothing_complete_or_a_whole_filesystem(
    attach: Attach, tmp_path: Path, fs_type: str
) -> None:
    device = attach(_SIZES[fs_type])
    content = ContentRecord(volume_id="v", state="formatting", fs_type=fs_type, planned_uuid=_UUID)
    writes = _made(device.path, fs_type, tmp_path / "calls", kill_at=0)
    assert writes > _MOMENTS
    assert _decision(content, device.path) is format_decision.Action.ADOPT

    decisions = []
    for number in range(1, writes + 1, max(1, writes // _MOMENTS)):
        _clear(device.path)
        _made(device.path, fs_type, tmp_path / "calls", kill_at=number)
        decisions.append(_decision(content, device.path))
        if decisions[-1] is format_decision.Action.ADOPT:
            subprocess.run([*_CHECK[fs_type], device.path], check=True, capture_output=True)
    assert format_decision.Action.CLEAR_AND_MAKE in decisions


def _made(device: str, fs_type: str, calls: Path, *, kill_at: int) -> int:
    """Make the filesystem by the driver's own command, killed at a call if there is a number; the calls so far."""
    row = mkfs._TABLE[fs_type]
    uuid = [word.format(_UUID) for word in row.uuid]
    inject = ("-e", f"inject={_WRITES}:signal=SIGKILL:when={kill_at}") if kill_at else ()
    program = row.command.index(f"mkfs.{fs_type}")
    strace = ("strace", "-o", str(calls), "-e", f"trace={_WRITES}", *inject)
    argv = [*row.command[:program], *strace, *row.command[program:], *uuid, device]
    subprocess.run(argv, check=not kill_at, capture_output=True)
    return len(re.findall(r"^\w+\(", calls.read_text(), re.MULTILINE))


def _decision(content: ContentRecord, device: str) -> format_decision.Action:
    return format_decision.judge_interrupted(
        content,
        signatures.probe_untrusted(device),
        left=lambda fs_type: superblocks.read(device, fs_type),
    )


def _clear(device: str) -> None:
    subprocess.run(["blkdiscard", "--zeroout", device], check=True, capture_output=True)
