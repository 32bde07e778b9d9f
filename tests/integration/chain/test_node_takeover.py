"""A takeover of `crust node`: the state of all its parts changes hands, and no call fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from crust.host.files import flocks
from crust.node import process
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.integration.chain.conftest import MIB, Chain
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Co

pytestmark = [pytest.mark.root, pytest.mark.parametrize("chain", ["node"], indirect=True)]


class Busy:
    """A kubelet that stages and publishes without a pause, and a sidecar that creates and deletes volumes."""

    def __init__(self, chain: Chain, volume_id: str) -> None:
        self._chain = chain
        self._volume_id = volume_id
        self._more = asyncio.Condition()
        self._is_ending = False
        self.cycles = {"kubelet": 0, "sidecar": 0}

    async def cycles_more(self, count: int) -> None:
        """Wait until each has gone round so many times from now on."""
        wanted = {name: done + count for name, done in self.cycles.items()}
        async with asyncio.timeout(60), self._more:
            await self._more.wait_for(
                lambda: all(self.cycles[name] >= least for name, least in wanted.items())
            )

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        """Call while the block runs, and go round to the end; an error ends it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._kubelet())
            group.create_task(self._sidecar())
            yield
            self._is_ending = True

    async def _kubelet(self) -> None:
        """A new connection for each cycle: published for the host and deferred, in turns."""
        while not self._is_ending:
            async with channel.connect(self._chain.places.csi) as connected:
                co = Co(connected)
                target = self._chain.places.target("busy")
                await co.publish(
                    self._volume_id,
                    target,
                    defer=self.cycles["kubelet"] % 2 == 0,
                    timeout_s=60,
                    staging_target_path=self._chain.staging(),
                    volume_context=nodes.NAMED,
                )
                await co.unpublish(self._volume_id, target, timeout_s=60)
            await self._count("kubelet")

    async def _sidecar(self) -> None:
        """One connection for all."""
        async with channel.connect(self._chain.places.csi) as connected:
            controller = csi_pb2_grpc.ControllerStub(connected)
            identity = csi_pb2_grpc.IdentityStub(connected)
            request = csi_pb2.CreateVolumeRequest(
                name="sidecar",
                volume_capabilities=[self._chain.capability(1)],
                capacity_range=csi_pb2.CapacityRange(required_bytes=16 * MIB),
            )
            while not self._is_ending:
                answer = await controller.CreateVolume(request, timeout=60)
                delete = csi_pb2.DeleteVolumeRequest(volume_id=answer.volume.volume_id)
                await controller.DeleteVolume(delete, timeout=60)
                await identity.GetPluginInfo(csi_pb2.GetPluginInfoRequest(), timeout=60)
                await self._count("sidecar")

    async def _count(self, name: str) -> None:
        async with self._more:
            self.cycles[name] += 1
            self._more.notify_all()


async def test_no_call_fails_while_a_node_takes_over_from_a_node(chain: Chain) -> None:
    volume_id = await chain.volume()
    busy = Busy(chain, volume_id)
    async with AsyncExitStack() as successors:
        async with busy.calling():
            await busy.cycles_more(3)
            second = process.running(chain.node_settings(take_over=True))
            await successors.enter_async_context(second)
            await busy.cycles_more(5)
        target = chain.places.target("after")
        async with channel.connect(chain.places.csi) as connected:
            await Co(connected).publish(
                volume_id,
                target,
                staging_target_path=chain.staging(),
                volume_context=nodes.NAMED,
            )
            with chain.sandbox(target):
                assert (await Co(connected).stats(volume_id, target)).usage
            # by the predecessor's connection, which leads to the successor
            await chain.co.unpublish(volume_id, target)
        await chain.check_gone(volume_id)


async def test_another_process_of_the_pool_or_the_run_directory_is_refused(chain: Chain) -> None:
    settings = chain.node_settings()
    (driver,) = settings.driver
    with pytest.raises(flocks.LockHeld, match=r"proxy\.lock"):
        async with process.running(settings):
            pass
    with pytest.raises(flocks.LockHeld, match=r"driver\.lock"):
        flocks.ProcessLock.acquire(f"{driver.run_dir}/driver.lock")


async def test_parts_have_no_socket_of_their_own(chain: Chain) -> None:
    assert not Path(chain.places.shim).exists()
    assert not Path(chain.places.driver).exists()
    async with channel.connect(chain.places.csi) as connected:
        stub = csi_pb2_grpc.IdentityStub(connected)
        answer = await stub.Probe(csi_pb2.ProbeRequest(), timeout=30)
    assert answer.ready.value


async def test_a_stopped_node_has_ended_its_operations_and_leaves_no_lock(chain: Chain) -> None:
    volume_id = await chain.volume()
    await chain.restart()
    with pytest.raises(grpc.aio.AioRpcError):
        await chain.co.publish("no-such-volume", chain.places.target("x"), defer=False)
    await chain.check_gone(volume_id)
