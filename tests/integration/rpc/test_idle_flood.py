"""A flood of connections by another user of the node reaches no socket of crust; the kubelet is served beside it."""

import sys
from asyncio import create_subprocess_exec, subprocess
from pathlib import Path

import pytest

from crust.rpc.serving import server
from tests.support.echo_service import echo, echo_service

pytestmark = pytest.mark.root

_STRANGER = 65534
_COUNT = 2000

_FLOOD = """
import collections, os, socket, sys
os.setgroups([])
os.setresgid(*[int(sys.argv[3])] * 3)
os.setresuid(*[int(sys.argv[3])] * 3)
outcomes, opened = collections.Counter(), []
for _ in range(int(sys.argv[2])):
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(sys.argv[1])
        opened.append(connection)
        outcomes["OK"] += 1
    except OSError as error:
        outcomes[type(error).__name__] += 1
print(os.getuid(), *outcomes.items(), flush=True)
sys.stdin.read()
"""


async def test_flood_of_another_user_does_not_keep_the_kubelet_out(tmp_path: Path) -> None:
    """The socket's own mode stops it: its directory may be everybody's, as that of a CO's plugins."""
    tmp_path.chmod(0o755)
    path = tmp_path / "csi.sock"
    async with server.serving(str(path), echo_service()):
        # the path is relative: the directories above it are not the stranger's to search
        flood = await create_subprocess_exec(
            *(sys.executable, "-IS", "-c", _FLOOD, path.name, str(_COUNT), str(_STRANGER)),
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert flood.stdout
        said = await flood.stdout.readline()
        answer = await echo(str(path))
        await flood.communicate(b"")  # the end of its input ends it
    assert said.decode() == f"{_STRANGER} ('PermissionError', {_COUNT})\n"
    assert answer == b"hello"
