"""Daemons of a whole node are killed with -9 while a sandbox has a volume: a normal event.

Each test has a node of its own, because the processes that it ends with are not those that it began with.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from crust import volumes
from crust.host.block import loop
from crust.host.mounts import mountinfo
from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.node import HANDLER
from tests.support import runtime_api
from tests.support.whole_node import MIB, WholeNode, refusal, whole_node

pytestmark = [pytest.mark.vm, pytest.mark.timeout(240)]

LIMITS = volumes.IoLimits(500, 400, 30 * MIB, 20 * MIB)
BYTES = csi_pb2.VolumeUsage.BYTES


@pytest_asyncio.fixture
async def node(guest_image: object, acceleration: object) -> AsyncIterator[WholeNode]:
    async with whole_node() as node:
        yield node
        await node.tidy()


async def test_killed_runtime_adopts_its_sandboxes_after_restart(node: WholeNode) -> None:
    """Limits stay in force. A freeze that nobody could thaw meanwhile is ended, and tells that it was."""
    volume = await node.volume()
    target = await node.publish(volume)
    boot = await node.output(
        "one", target, "cat /proc/sys/kernel/random/boot_id; echo kept > /data/f"
    )
    async with runtime_api.connected(node) as api:
        assert await api.limit(target, LIMITS) is True
        assert await api.freeze(target, 60) is True
        await node.daemons.kill("runtime")
        await check_nothing_is_pretended(api, target)
    code, message = await refusal(node.kubelet.unpublish(volume, target))
    assert code is grpc.StatusCode.FAILED_PRECONDITION, "the VM holds the claim, whoever else dies"
    assert "one" in message
    code, _ = await refusal(node.kubelet.stats(volume, target))
    assert code is grpc.StatusCode.UNAVAILABLE
    await node.daemons.start("runtime")
    await node.kubelet.wait_ready(HANDLER)
    assert (await node.kubelet.stats(volume, target))[BYTES].used > 0
    again = await node.output("one", target, "cat /proc/sys/kernel/random/boot_id; cat /data/f")
    assert again.splitlines() == [boot, "kept"]
    assert await runtime_api.limits_in_force(node) == {str(target): LIMITS}
    assert await node.output("one", target, "echo goes on > /data/g; cat /data/g") == "goes on"
    async with runtime_api.connected(node) as api:
        assert await api.thaw(target) is False


async def check_nothing_is_pretended(api: runtime_api.RuntimeApi, target: Path) -> None:
    """A sandbox has the volume, and its handler is away: not known is not nothing."""
    for asked in (api.freeze(target, 60), api.thaw(target), api.limit(target, volumes.IoLimits())):
        code, _ = await refusal(asked)
        assert code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("victim", ["driver", "shim", "proxy"])
async def test_killed_daemon_restarts_and_the_volume_stays_usable(
    node: WholeNode, victim: str
) -> None:
    """A freeze too, which is the guest's, until it is thawed."""
    volume = await node.volume()
    target = await node.publish(volume)
    await node.output("one", target, "echo kept > /data/f")
    async with runtime_api.connected(node) as api:
        assert await api.freeze(target, 60) is True
        await node.daemons.kill(victim)
        await node.daemons.start(victim)
        await node.kubelet.wait_ready(HANDLER)
        assert await api.thaw(target) is True
    assert (await node.kubelet.stats(volume, target))[BYTES].used > 0
    assert await node.kubelet.expand(volume, target, 128 * MIB) == 128 * MIB
    assert await node.output("one", target, "cat /data/f") == "kept"
    await node.runtime.stop("one")
    await node.kubelet.unpublish(volume, target)
    node.published.remove((volume, target))
    await node.kubelet.unstage(volume)
    assert not [each for each in loop.list_all() if volume.volume_id in each.backing]
    assert mountinfo.at(str(target)) is None
