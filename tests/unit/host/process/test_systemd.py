"""What systemd is told, and by whom."""

import os
import socket
from pathlib import Path

import pytest

from crust.host.process import systemd


@pytest.mark.parametrize("address", ["PATH", "@crust-test"])
def test_systemd_is_told_of_start_and_that_process_lives(tmp_path: Path, address: str) -> None:
    """At a socket with a path, and at an abstract one."""
    address = address.replace("PATH", str(tmp_path / "notify")).replace("@", f"@{os.getpid()}-")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listens:
        listens.bind(address.replace("@", "\0"))
        unit = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "60000000"}
        assert systemd.ping_watchdog(unit)
        assert listens.recv(64) == b"WATCHDOG=1"
        assert systemd.ping_watchdog(unit | {"WATCHDOG_PID": str(os.getpid())})
        assert listens.recv(64) == b"WATCHDOG=1"
        assert systemd.report_serving({"NOTIFY_SOCKET": address})
        assert listens.recv(64) == b"READY=1"
    assert systemd.ping_watchdog(unit), "a systemd that does not listen is no error"


def test_nothing_is_sent_outside_of_unit_or_for_another_process(tmp_path: Path) -> None:
    here = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    assert not systemd.report_serving({})
    assert not systemd.ping_watchdog({})
    assert not systemd.ping_watchdog({"WATCHDOG_USEC": "1"})
    assert not systemd.ping_watchdog(here)
    assert not systemd.ping_watchdog(here | {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"})
