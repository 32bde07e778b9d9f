"""A CO that learns of the node from the controller, against our driver as processes: alone, behind shim and proxy, as
one process with them, and as a driver that the shim wraps."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.co import Co, capability
from tests.support.drivers import own_driver
from tests.support.drivers.own_driver import MAX_VOLUMES, OwnDriver
from tests.support.kubelet.attaching_co import AttachingCo, Shape

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

MIB = 1 << 20
NODE_ID = "conformance-node"
ALL_SHAPES = [pytest.param(each, id=each.value) for each in Shape]
CAPABILITY = capability(mode="SINGLE_NODE_SINGLE_WRITER")


@pytest.fixture(params=["alone", "behind-proxy", "node", "wrapped"])
def driver(request: pytest.FixtureRequest, short_dir: Path) -> Iterator[OwnDriver]:
    with own_driver.serving(short_dir, "1.12", request.param) as serving:
        yield serving


@asynccontextmanager
async def cos(driver: OwnDriver, *shapes: Shape) -> AsyncIterator[list[AttachingCo]]:
    """COs of the same node, each with connections of its own."""
    async with AsyncExitStack() as stack:
        connected = [
            await stack.enter_async_context(channel.connect(str(driver.socket)))
            for _ in range(2 * len(shapes))
        ]
        node, controller = connected[::2], connected[1::2]
        yield [AttachingCo(*each) for each in zip(shapes, node, controller, strict=True)]


async def made(connected: grpc.aio.Channel, count: int, stem: str) -> list[str]:
    names = [f"{stem}-{number}" for number in range(count)]
    created = await asyncio.gather(*(Co(connected).create(name, CAPABILITY) for name in names))
    return [volume.volume_id for volume in created]


@pytest.mark.spec("N-2", "N-4", "N-9", "N-10")
async def test_co_learns_from_the_controller_and_when_full(driver: OwnDriver) -> None:
    """A second CO takes two slots behind the first one's back, which finds them when it is refused."""
    async with cos(driver, Shape.FLAG, Shape.IDS_IN_RESPONSE, Shape.IDS_IN_REQUEST) as found:
        co, by_id, other = found
        for each in found:
            await each.register()
            assert each.node_id == NODE_ID
        volumes = await made(co.controller, MAX_VOLUMES + 2, "pvc")
        early = asyncio.create_task(co.attach(volumes[0], CAPABILITY))
        await asyncio.sleep(0)
        assert not co.attachments, "nothing is attached before topology and limit are known"
        learned = await co.learn()
        assert await early
        info = await csi_pb2_grpc.NodeStub(co.node).NodeGetInfo(csi_pb2.NodeGetInfoRequest())
        assert learned.topology == dict(info.accessible_topology.segments) != {}
        assert learned.limit == info.max_volumes_per_node == MAX_VOLUMES
        assert (await by_id.learn()).limit == MAX_VOLUMES - 1, "the first CO's volume has a slot"
        assert await asyncio.gather(
            *(co.attach(volume, CAPABILITY) for volume in volumes[1 : MAX_VOLUMES - 2])
        )
        await other.learn()
        for last in volumes[-2:]:
            assert await other.attach(last, CAPABILITY)
        assert co.exhausted == 0
        assert not await co.attach(volumes[MAX_VOLUMES - 2], CAPABILITY)
        assert (co.exhausted, co.pending) == (1, [volumes[MAX_VOLUMES - 2]])
        assert co.learned[-1].foreign == other.attached
        assert co.learned[-1].limit == len(co.attached) == MAX_VOLUMES - 2
        assert not await co.attach(volumes[MAX_VOLUMES - 1], CAPABILITY)
        assert co.exhausted == 1, "a node that is known to be full is not asked again"
        # the next tick finds a free slot
        ticks = asyncio.Queue[None]()
        following = asyncio.create_task(co.follow(ticks))
        await other.detach(volumes[-1])
        ticks.put_nowait(None)
        await ticks.join()
        assert await co.attach(co.pending.pop(0), CAPABILITY)
        following.cancel()


@pytest.mark.spec("N-8")
async def test_co_that_names_its_volumes_gets_the_rest(driver: OwnDriver) -> None:
    async with cos(driver, Shape.IDS_IN_REQUEST, Shape.FLAG) as (co, other):
        for each in (co, other):
            await each.register()
            assert (await each.learn()).limit == MAX_VOLUMES
        volumes = await made(co.controller, 3, "pvc")
        assert await co.attach(volumes[0], CAPABILITY)
        assert await other.attach(volumes[1], CAPABILITY)
        assert await other.attach(volumes[2], CAPABILITY)
        assert (await co.learn()).limit == MAX_VOLUMES - 2
        await co.detach(volumes[0])


@pytest.mark.spec("N-7")
@pytest.mark.parametrize("shape", ALL_SHAPES)
async def test_attach_while_the_co_learns_is_its_own(driver: OwnDriver, shape: Shape) -> None:
    """Attaches and questions at once: the limit is the same in each answer."""
    async with cos(driver, shape) as (co,):
        await co.register()
        await co.learn()
        volumes = await made(co.controller, 12, "pvc")
        await asyncio.gather(
            *(co.attach(volume, CAPABILITY) for volume in volumes), *(co.learn() for _ in volumes)
        )
        assert co.attached == set(volumes)
        assert {each.limit for each in co.learned} == {MAX_VOLUMES}
        assert {each.foreign for each in co.learned} == {frozenset()}
