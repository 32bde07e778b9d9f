"""The datagrams to systemd, as sd_notify(3) has them."""

import os
import socket
from pathlib import Path

from crust.host.process import systemd


def test_watchdog_is_notified_at_the_socket_of_systemd(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listens:
        listens.bind(str(path))
        unit = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "60000000"}
        assert systemd.ping_watchdog(unit)
        assert listens.recv(64) == b"WATCHDOG=1"
        assert systemd.ping_watchdog(unit | {"WATCHDOG_PID": str(os.getpid())})


def test_watchdog_is_notified_at_an_abstract_socket() -> None:
    name = f"crust-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listens:
        listens.bind(f"\0{name}")
        assert systemd.ping_watchdog({"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "1"})
        assert listens.recv(64) == b"WATCHDOG=1"


def test_nothing_is_sent_without_a_watchdog_or_for_another_process(tmp_path: Path) -> None:
    here = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    assert not systemd.ping_watchdog({})
    assert not systemd.ping_watchdog({"WATCHDOG_USEC": "1"})
    assert not systemd.ping_watchdog(here)
    assert not systemd.ping_watchdog(here | {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"})


def test_systemd_that_does_not_listen_is_no_error(tmp_path: Path) -> None:
    assert systemd.ping_watchdog(
        {"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "60000000"}
    )


def test_start_is_reported_with_and_without_a_watchdog(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    assert not systemd.report_serving({})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listens:
        listens.bind(str(path))
        assert systemd.report_serving({"NOTIFY_SOCKET": str(path)})
        assert listens.recv(64) == b"READY=1"
