"""`crust keeper`, started by a shell: a runtime not in Python, which speaks to the socket by itself."""

import contextlib
import json
import os
import select
import socket as sockets
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from crust.handoff.store import Store
from crust.runtime_handler.blocking import Claim
from tests.integration.runtime_handler.conftest import is_held, vm_process

pytestmark = pytest.mark.root

RUNTIME = 'set -e; line=$("$0" -m crust keeper "$@"); echo "$line"'
"""A shell that starts the keeper and reads its line, as a runtime in any language does."""


def _run(*arguments: object, fds: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", RUNTIME, sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, pass_fds=fds, capture_output=True, text=True, check=False, timeout=60
    )


def _started(*arguments: object, fds: tuple[int, ...] = ()) -> dict[str, Any]:
    ran = _run(*arguments, fds=fds)
    assert ran.returncode == 0, ran.stderr
    state: dict[str, Any] = json.loads(ran.stdout)
    return state


def _held_by_keeper(socket: Path, process: subprocess.Popen[bytes], claim: Claim) -> dict[str, Any]:
    lock, device = claim.fds
    own = ("--socket", socket, "--pid", process.pid, "--hold", f"volume={lock},{device}")
    state = _started(*own, fds=claim.fds)
    claim.hand_over(*state["pids"])
    return state


def _asked(socket: Path, *pieces: bytes) -> dict[str, Any]:
    """The answer to one request, as a client in any language gets it."""
    with sockets.socket(sockets.AF_UNIX) as client:
        client.connect(str(socket))
        for piece in pieces:
            client.sendall(piece)
        answer: dict[str, Any] = json.loads(client.makefile().readline())
        return answer


def test_running_keeper_takes_more_and_releases_by_its_socket(
    store: Store, claim: Claim, process: subprocess.Popen[bytes], socket: Path
) -> None:
    first = _held_by_keeper(socket, process, claim)
    own = ("--socket", socket, "--pid", process.pid)
    with open(os.devnull, "rb") as other:
        fd = other.fileno()
        state = _started(*own, "--hold", f"other={fd}", fds=(fd,))
    assert (state["pids"][0], state["held"]) == (first["pids"][0], {"volume": 2, "other": 1})
    assert _asked(socket, b'{"op": "rele', b'ase", "name": "other"}\n')["held"] == {"volume": 2}
    assert _started(*own)["held"] == {"volume": 2}
    assert is_held(store, claim.record.device)


def test_keeper_has_no_descriptor_that_it_was_not_given(
    claim: Claim, process: subprocess.Popen[bytes], socket: Path, tmp_path: Path
) -> None:
    lock, device = claim.fds
    end = os.pidfd_open(process.pid)
    with open(tmp_path / "another", "w") as another:
        state = _started(
            "--socket", socket, "--pidfd", end, "--hold", f"volume={lock},{device}",
            fds=(*claim.fds, end, another.fileno()),
        )  # fmt: skip
    os.close(end)
    for pid in state["pids"]:
        paths = [os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
        assert str(tmp_path / "another") not in paths
        assert claim.record.device in paths
    claim.release()


def test_only_client_that_sends_no_line_is_disconnected(
    claim: Claim, process: subprocess.Popen[bytes], socket: Path
) -> None:
    _held_by_keeper(socket, process, claim)
    with sockets.socket(sockets.AF_UNIX) as client, sockets.socket(sockets.AF_UNIX) as other:
        for connection in (client, other):
            connection.connect(str(socket))
        client.sendall(b"x" * (64 * 1024 + 1))
        assert select.select([client], [], [], 20)[0]
        with pytest.raises(ConnectionError):
            assert client.recv(1) or client.send(b"x") * client.send(b"x")
        other.sendall(b'{"op": "held"}\n')
        assert json.loads(other.makefile().readline())["held"] == {"volume": 2}
    assert "unknown request" in _asked(socket, b"[]\n")["error"]


def test_hypervisor_that_has_ended_is_refused(socket: Path) -> None:
    with vm_process() as ended:
        end = os.pidfd_open(ended.pid)
    for given, says in (
        (("--pid", ended.pid), "the process has ended"),
        (("--pidfd", end), "is not a pidfd of a process that runs"),
    ):
        ran = _run("--socket", socket, *given, fds=(end,))
        assert ran.returncode == 1, ran.stderr
        assert says in ran.stderr
    os.close(end)
    assert not socket.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--pid or by --pidfd"),
        (("--pid", "1", "--pidfd", "0"), "--pid or by --pidfd"),
        (("--pid", "1", "--hold", "volume"), "is not NAME=FD,FD"),
        (("--pid", "1", "--hold", "volume=99"), "was it inherited?"),
    ],
)
def test_command_that_cannot_be_understood_starts_nothing(
    socket: Path, arguments: tuple[str, ...], says: str
) -> None:
    ran = _run("--socket", socket, *arguments)
    assert ran.returncode == 2
    assert says in ran.stderr
    assert not socket.exists()


def test_a_file_and_the_socket_of_another_program_are_left(
    process: subprocess.Popen[bytes], socket: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    ran = _run("--socket", file, "--pid", process.pid)
    assert (ran.returncode, file.read_text()) == (1, "kept")
    assert "[KeeperPathTaken]" in ran.stderr
    with sockets.create_server(str(socket), family=sockets.AF_UNIX) as other:
        for answer, name in ((b"", "[KeeperPathTaken]"), (b"hello\n", "[KeeperRefused]")):
            serving = threading.Thread(target=_answering, args=(other, answer), daemon=True)
            serving.start()
            ran = _run("--socket", socket, "--pid", process.pid)
            assert ran.returncode == 1
            assert name in ran.stderr
            with sockets.socket(sockets.AF_UNIX) as last:
                last.connect(str(socket))
                last.sendall(_LAST)
            serving.join()
    socket.unlink()


_LAST = b"last"


def _answering(listener: sockets.socket, answer: bytes) -> None:
    """Answer each connection, and end it, until one says that it is the last."""
    asked = b""
    while asked != _LAST:
        connection, _ = listener.accept()
        with connection:
            asked = connection.recv(1024)
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(answer)
