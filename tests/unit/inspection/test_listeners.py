"""A command that cannot connect names the process that should have taken the connection."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from crust.inspection import listeners
from crust.rpc.serving import sockets

START = "start the proxy"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "inspect.sock")


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        yield server


def test_full_queue_names_the_process_and_its_connections(path: str, server: socket.socket) -> None:
    server.bind(path)
    server.listen(1)
    with ExitStack() as clients:
        for _ in range(2):
            clients.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
        for failure in (OSError(errno.EAGAIN, ""), TimeoutError()):
            why, hint = listeners.reason(path, failure, START)
            assert why == f"process {os.getpid()} accepts none of 2 connections"
            assert hint == "read its log, restart it"


def test_removed_file_names_the_process_that_serves_it(path: str, server: socket.socket) -> None:
    server.bind(path)
    server.listen()
    os.unlink(path)
    why, _ = listeners.reason(path, OSError(errno.ENOENT, ""), START)
    assert why == f"process {os.getpid()} serves it, and its file was removed or replaced"


def test_server_of_crust_is_found_after_its_rename(path: str, server: socket.socket) -> None:
    server.bind(sockets.beside(path))
    server.listen()
    os.rename(sockets.beside(path), path)
    assert listeners.at(path) == listeners.Listener((os.getpid(),), is_at_path=True, waiting=0)
    os.unlink(path)
    Path(path).touch()
    assert listeners.at(path) == listeners.Listener((os.getpid(),), is_at_path=False, waiting=0)


def test_path_that_nobody_serves_says_how_to_start(path: str, server: socket.socket) -> None:
    server.bind(path)  # it does not listen
    assert listeners.at(path) is None
    stale = "the socket is stale, no process listens on it"
    assert listeners.reason(path, OSError(errno.ECONNREFUSED, ""), START) == (stale, START)


def test_kernel_that_does_not_answer_is_no_listener_named(
    path: str, server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.bind(path)
    server.listen()

    def refused() -> list[object]:
        raise OSError(errno.ENOENT, "no unix_diag")

    monkeypatch.setattr(listeners, "_listening", refused)
    why, _ = listeners.reason(path, TimeoutError(), START)
    assert why == "it does not accept the connection"
