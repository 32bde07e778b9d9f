"""Block devices by serial number, and waiting for them: the kernel reports hot-plug and growth as uevents.

The socket is opened before the first look, so no event in between is missed; an event only means "look again".
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time

from . import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

_NETLINK_KOBJECT_UEVENT = 15
_SYS_BLOCK = "/sys/block"
_DEV = "/dev"
_SECTOR = 512


def find(serial: str) -> str | None:
    """Kernel name (`vda`) of the disk with this serial number, or None."""
    for name in os.listdir(_SYS_BLOCK):
        if _read(f"{_SYS_BLOCK}/{name}/serial") == serial:
            return name
    return None


def wait_for(serial: str, timeout_s: float) -> str:
    """Kernel name of the disk, as soon as it can be opened. Faults: timeout."""
    kernel_name = wait_until(lambda: _usable(serial), timeout_s)
    if kernel_name is None:
        raise protocol.Fault(
            "timeout",
            f"no disk with serial {serial} appeared within {timeout_s:g} s",
            "attach the device to the VM first",
        )
    return kernel_name


def _usable(serial: str) -> str | None:
    """The disk, unless it cannot be opened yet.

    Its directory appears first, and an open fails with ENXIO until the kernel has finished it. Then comes the uevent.
    """
    name = find(serial)
    if name is None:
        return None
    try:
        os.close(os.open(f"{_DEV}/{name}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as err:
        if err.errno in (errno.ENXIO, errno.ENOENT):
            return None
        raise
    return name


def leave_order_to_host(name: str) -> None:
    """Have no scheduler for a disk: the host has its own, and the guest's costs time for each request.

    A kernel with other schedulers keeps its choice.
    """
    path = f"{_SYS_BLOCK}/{name}/queue/scheduler"
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
        file.write("none")


def wait_for_size(name: str, at_least_bytes: int, timeout_s: float) -> int:
    """Size of a disk once it has `at_least_bytes`. Faults: timeout."""
    reached = wait_until(lambda: size_bytes(name) >= at_least_bytes or None, timeout_s)
    if reached is None:
        raise protocol.Fault(
            "timeout",
            f"{name} has {size_bytes(name)} bytes after {timeout_s:g} s, wanted {at_least_bytes}",
            "resize the device on the host first",
        )
    return size_bytes(name)


def size_bytes(name: str) -> int:
    """Capacity of a disk; 0 if it is absent."""
    return int(_read(f"{_SYS_BLOCK}/{name}/size") or "0") * _SECTOR


def is_read_only(name: str) -> bool:
    """Whether the disk itself refuses writes."""
    return _read(f"{_SYS_BLOCK}/{name}/ro") == "1"


def number(name: str) -> str:
    """`major:minor` as in mountinfo; empty if the disk is absent."""
    return _read(f"{_SYS_BLOCK}/{name}/dev")


def is_held(name: str) -> bool:
    """Whether the disk is mounted in any namespace; an exclusive open asks the kernel itself."""
    try:
        fd = os.open(f"{_DEV}/{name}", os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
    except OSError:
        return os.path.exists(f"{_SYS_BLOCK}/{name}")
    os.close(fd)
    return False


def wait_until(look: Callable[[], T | None], timeout_s: float) -> T | None:
    """The result of `look`, called again after each uevent; None if `look` found nothing in time."""
    deadline = time.monotonic() + timeout_s
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, _NETLINK_KOBJECT_UEVENT) as events:
        events.bind((0, 1))
        while (seen := look()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([events], [], [], left_s)[0]:
                return look()
            _drain(events)
        return seen


def _drain(events: socket.socket) -> None:
    try:
        events.recv(65536)
    except OSError:
        # ENOBUFS: events were lost, which does not matter because every event only means "look again".
        return


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as source:
            return source.read().strip()
    except OSError:
        return ""
