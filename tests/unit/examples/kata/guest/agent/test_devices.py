"""The agent's disks by serial number: a directory stands in for /sys/block, another one for /dev."""

import socket
from pathlib import Path

import pytest

from examples.kata.guest.agent import devices, protocol


@pytest.fixture
def sys_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("_SYS_BLOCK", "_DEV"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(devices, name, str(tmp_path / name))
    disk = tmp_path / "_SYS_BLOCK" / "vda"
    (disk / "queue").mkdir(parents=True)
    (disk / "serial").write_text("one\n")
    return disk


def test_disk_that_cannot_be_opened_yet_is_waited_for(sys_block: Path, tmp_path: Path) -> None:
    """Its directory is there before it: an open fails with ENXIO then, as that of a socket does."""
    node = tmp_path / "_DEV" / "vda"
    with pytest.raises(protocol.Fault, match="no disk with serial one"):
        devices.wait_for("one", 0)
    with socket.socket(socket.AF_UNIX) as unfinished:
        unfinished.bind(str(node))
        with pytest.raises(protocol.Fault, match="no disk with serial one"):
            devices.wait_for("one", 0)
    node.unlink()
    node.touch()
    assert devices.wait_for("one", 0) == "vda"


def test_disk_has_no_scheduler_where_the_kernel_can(sys_block: Path) -> None:
    devices.leave_order_to_host("vda")
    assert (sys_block / "queue" / "scheduler").read_text() == "none"
    devices.leave_order_to_host("vdb")  # its kernel has no such file
