"""A keeper that cannot accept a connection does not ask again at once: poll(2) would answer so without an end."""

import errno
import os
import socket
from pathlib import Path

import pytest

from crust.runtime_handler import keeper
from crust.runtime_handler.keeper import KeeperProcess


class Listener(socket.socket):
    """A listening socket whose process has no descriptor left, or whose client has gone."""

    error = errno.EMFILE

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(self.error, os.strerror(self.error))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], int | None]]:
    """The descriptors of each wait of a keeper, and its limit in milliseconds."""
    seen: list[tuple[tuple[int, ...], int | None]] = []

    def wait(*fds: int, timeout_ms: int | None = None) -> set[int]:
        seen.append((fds, timeout_ms))
        return set()

    monkeypatch.setattr(keeper, "_wait", wait)
    return seen


@pytest.mark.parametrize(
    ("error", "is_waited"),
    [
        (errno.EMFILE, True),
        (errno.ENFILE, True),
        (errno.ENOMEM, True),
        (errno.EAGAIN, False),
        (errno.ECONNABORTED, False),
    ],
)
def test_connection_that_cannot_be_accepted_is_waited_for(
    tmp_path: Path,
    waits: list[tuple[tuple[int, ...], int | None]],
    error: int,
    *,
    is_waited: bool,
) -> None:
    """It waits for the VM, the standby and its clients, and not for the listener, which stays readable."""
    with Listener(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as vm:
        listener.bind(str(tmp_path / "s"))
        listener.error = error
        KeeperProcess(listener, vm.fileno())._accept()
        assert [limit for _, limit in waits] == ([1000] if is_waited else [])
        assert all(listener.fileno() not in fds and vm.fileno() in fds for fds, _ in waits)
