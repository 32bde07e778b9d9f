"""A socket's owner may be in a PID namespace that is invisible here, as a vendor's driver pod is to the proxy's."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from crust.host.answers import NotSeen
from crust.proxy import handlers

pytestmark = pytest.mark.root

_SERVE = """
import asyncio, sys
from crust.core import errors
from crust.rpc.serving import server
from crust.rpc.serving.service import Service

async def main():
    async with server.serving(sys.argv[1], Service("t"), lock_path=sys.argv[2]):
        print("serves")

try:
    asyncio.run(main())
except errors.CrustError as error:
    print(error.error_name, error)
"""


def _serve_in_other_pid_namespace(path: Path) -> str:
    argv = ["unshare", "--pid", "--fork", sys.executable, "-c", _SERVE, str(path), f"{path}.lock"]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=50)
    return done.stdout


def test_server_never_takes_a_live_socket_of_another_pid_namespace(tmp_path: Path) -> None:
    """SO_PEERCRED says process 0 there: that is somebody, and not nobody."""
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as vendor:
        vendor.bind(str(path))
        vendor.listen()
        before = os.stat(path).st_ino
        printed = _serve_in_other_pid_namespace(path)
        assert printed.startswith("SocketInUse")
        assert "a process of another PID namespace (another container) already listens" in printed
        assert os.stat(path).st_ino == before


def test_server_replaces_a_dead_socket_of_another_pid_namespace(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as vendor:
        vendor.bind(str(path))
    assert _serve_in_other_pid_namespace(path) == "serves\n"


_CHECK = """
import sys
from crust.core import errors
from crust.proxy import handlers

try:
    handlers._check_visible(sys.argv[1])
    print("seen")
except errors.CrustError as error:
    print(error.error_name, error)
"""


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        pytest.param((), "seen", id="beside it"),
        pytest.param(("unshare", "--pid", "--fork"), "hostPID", id="in another PID namespace"),
        pytest.param(
            ("setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"),
            "CAP_SYS_PTRACE",
            id="without the capability",
        ),
    ],
)
def test_handler_whose_process_is_hidden_is_not_registered(
    tmp_path: Path, prefix: tuple[str, ...], words: str
) -> None:
    """Its virtual machines would be hidden too, and a device that one of them has would pass for unused."""
    path = tmp_path / "handler.sock"
    with socket.socket(socket.AF_UNIX) as handler:
        handler.bind(str(path))
        handler.listen()
        argv = [*prefix, sys.executable, "-c", _CHECK, str(path)]
        printed = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=50)
    assert words in printed.stdout
    assert printed.stdout.startswith("NotSeen" if prefix else "seen")


def test_handler_without_a_listener_is_not_registered(tmp_path: Path) -> None:
    with pytest.raises(NotSeen, match="serve the endpoint before Register"):
        handlers._check_visible(str(tmp_path / "handler.sock"))
