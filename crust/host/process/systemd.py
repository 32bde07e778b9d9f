"""The watchdog of systemd: a unit with WatchdogSec= is restarted unless its process says regularly that it lives.

No library: it is one datagram. Without such a unit nothing is sent.
"""

import contextlib
import os
import socket
from collections.abc import Mapping


def ping_watchdog(environ: Mapping[str, str] = os.environ) -> bool:
    """Say that this process lives, if systemd waits for it; returns whether it does. Never blocks."""
    path = environ.get("NOTIFY_SOCKET", "")
    is_meant = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    if not (path and is_meant and "WATCHDOG_USEC" in environ):
        return False
    address = f"\0{path[1:]}" if path.startswith("@") else path
    to = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with (
        to,
        contextlib.suppress(OSError),
    ):  # a full queue, or a systemd that restarts: the next ping
        to.sendto(b"WATCHDOG=1", address)
    return True
