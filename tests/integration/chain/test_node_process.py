"""`crust node` as a process: its locks, the sockets that it has not, its end."""

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


async def test_stopped_node_has_ended_its_operations_and_leaves_no_lock(chain: BlockNode) -> None:
    await chain.volume()
    await chain.restart()
    with pytest.raises(grpc.aio.AioRpcError):
        await chain.co.publish("no-such-volume", chain.places.target("x"), defer=False)
