"""`crust node` as a process: its locks, the sockets that it has not, what another user reaches, its end."""

import os
import sys
from asyncio import create_subprocess_exec, subprocess
from pathlib import Path

import grpc.aio
import pytest

from crust.host.files import locks
from crust.node import node_process
from crust.rpc.serving import daemon
from tests.support.nodes.served_node import BlockNode

pytestmark = [pytest.mark.root, pytest.mark.parametrize("chain", ["node"], indirect=True)]


async def test_another_process_of_pool_or_run_directory_is_refused(
    chain: BlockNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "LOCK_WAIT_S", 0)
    settings = chain.node_settings()
    (driver,) = settings.driver
    with pytest.raises(locks.LockHeld, match=r"proxy\.lock"):
        async with node_process.running(settings):
            pass
    with pytest.raises(locks.LockHeld, match=r"driver\.lock"):
        locks.ProcessLock.acquire(f"{driver.run_dir}/driver.lock")


async def test_parts_have_no_socket_of_their_own(chain: BlockNode) -> None:
    assert not Path(chain.places.shim).exists()
    assert not Path(chain.places.driver).exists()
    assert await chain.co.is_ready()


_STRANGER = """
import os, socket, stat, sys, threading
os.setgroups([])
os.setresgid(*[65534] * 3)
os.setresuid(*[65534] * 3)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
reached = set()
def reach(path, how, call):
    try:
        call()
        reached.add((how, path))
    except OSError:
        pass
def look():
    for directory, names, files in os.walk("."):
        if os.access(directory, os.W_OK):
            reached.add(("make", directory))
        for path in (os.path.join(directory, name) for name in files):
            with socket.socket(socket.AF_UNIX) as caller:
                reach(path, "connect", lambda: caller.connect(path))
            for how, flag in (("read", os.O_RDONLY), ("write", os.O_WRONLY)):
                reach(path, how, lambda: os.close(os.open(path, flag | os.O_NONBLOCK)))
look()
print("began", flush=True)
while not ended.is_set():
    look()
look()
print(*sorted(reached))
"""
"""What another user reaches below the working directory, from the first look to the end of the input."""


async def test_another_user_reaches_nothing_during_starts(chain: BlockNode) -> None:
    """The directories exist, and everybody may enter them."""
    pipe, umask = subprocess.PIPE, os.umask(0o077)  # a daemon's own, whatever its parent has
    root = Path(chain.places.root)
    await chain.stop()
    for path in (root, root / "run", root / "driver-run", root / "state"):
        path.chmod(0o755)
    argv = (sys.executable, "-IS", "-c", _STRANGER)
    stranger = await create_subprocess_exec(*argv, cwd=root, stdin=pipe, stdout=pipe)
    try:
        assert stranger.stdout is not None
        assert await stranger.stdout.readline() == b"began\n"
        await chain.start()
        for _ in range(3):
            await chain.restart()
        volume_id, target = await chain.volume(), chain.places.target("one")
        await chain.publish(volume_id, target, defer=False)
        await chain.co.snapshot(volume_id)
    finally:
        reached, _ = await stranger.communicate(b"")
        os.umask(umask)
    assert reached.decode() == "\n"


async def test_stopped_node_has_ended_its_operations_and_leaves_no_lock(chain: BlockNode) -> None:
    await chain.volume()
    await chain.restart()
    with pytest.raises(grpc.aio.AioRpcError):
        await chain.co.publish("no-such-volume", chain.places.target("x"), defer=False)
