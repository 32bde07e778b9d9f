"""A process tells systemd that it serves (Type=notify) and that it lives (WatchdogSec=); sd_notify(3).

Each message is one datagram, without a library. Outside of such a unit the process sends nothing. It repeats no lost
message: a start that systemd misses ends at its TimeoutStartSec=, and the next ping comes in a few seconds.
"""

import contextlib
import os
import socket
from collections.abc import Mapping


def report_serving(environ: Mapping[str, str] = os.environ) -> bool:
    """Say that this process serves, if systemd waits for it; returns whether it does. Never blocks."""
    return _send(b"READY=1", environ)


def ping_watchdog(environ: Mapping[str, str] = os.environ) -> bool:
    """Say that this process lives, if systemd waits for it; returns whether it does. Never blocks."""
    is_meant = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return "WATCHDOG_USEC" in environ and is_meant and _send(b"WATCHDOG=1", environ)


def _send(message: bytes, environ: Mapping[str, str]) -> bool:
    path = environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = f"\0{path[1:]}" if path.startswith("@") else path
    to = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with to, contextlib.suppress(OSError):  # a full queue, or a systemd that restarts
        to.sendto(message, address)
    return True
