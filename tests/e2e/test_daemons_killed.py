"""The daemons of a whole node are killed with SIGKILL while a sandbox has a volume.

Each test has a node of its own, because it restarts processes.
"""

from pathlib import Path

import grpc
import pytest

from crust.core import volumes
from crust.host.block import loop
from crust.host.mounts import mountinfo
from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.node import HANDLER
from tests.support.nodes.whole_node import MIB, WholeNode, refusal
from tests.support.runtimes import runtime_api

pytestmark = [pytest.mark.vm, pytest.mark.timeout(240)]

LIMITS = volumes.IoLimits(500, 400, 30 * MIB, 20 * MIB)
BYTES = csi_pb2.VolumeUsage.BYTES


async def test_killed_runtime_adopts_its_sandboxes_after_restart(fresh_node: WholeNode) -> None:
    """Limits stay in force. The adopting daemon ends a freeze that began before, and the thaw reports it."""
    volume = await fresh_node.volume()
    target = await fresh_node.publish(volume)
    boot = await fresh_node.output(
        "one", target, "cat /proc/sys/kernel/random/boot_id; echo kept > /data/f"
    )
    async with runtime_api.connected(fresh_node) as api:
        assert await api.limit(target, LIMITS) is True
        assert await api.freeze(target, 60) is True
        await fresh_node.daemons.kill("runtime")
        await check_unavailable(api, target)
    code, message = await refusal(fresh_node.kubelet.unpublish(volume, target))
    assert code is grpc.StatusCode.FAILED_PRECONDITION, "the VM still holds the claim"
    assert "one" in message
    code, _ = await refusal(fresh_node.kubelet.stats(volume, target))
    assert code is grpc.StatusCode.UNAVAILABLE
    await fresh_node.daemons.start("runtime")
    await fresh_node.kubelet.wait_ready(HANDLER)
    assert (await fresh_node.kubelet.stats(volume, target))[BYTES].used > 0
    again = await fresh_node.output(
        "one", target, "cat /proc/sys/kernel/random/boot_id; cat /data/f"
    )
    assert again.splitlines() == [boot, "kept"]
    assert await runtime_api.limits_in_force(fresh_node) == {str(target): LIMITS}
    assert (
        await fresh_node.output("one", target, "echo goes on > /data/g; cat /data/g") == "goes on"
    )
    async with runtime_api.connected(fresh_node) as api:
        assert await api.thaw(target) is False


async def check_unavailable(api: runtime_api.RuntimeApi, target: Path) -> None:
    """A sandbox has the volume and its handler does not run: the answer is UNAVAILABLE, not "no sandbox"."""
    for asked in (api.freeze(target, 60), api.thaw(target), api.limit(target, volumes.IoLimits())):
        code, _ = await refusal(asked)
        assert code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("victim", ["driver", "shim", "proxy"])
async def test_killed_daemon_leaves_the_volume_usable(fresh_node: WholeNode, victim: str) -> None:
    """A freeze also survives, because the guest holds it until the thaw."""
    volume = await fresh_node.volume()
    target = await fresh_node.publish(volume)
    await fresh_node.output("one", target, "echo kept > /data/f")
    async with runtime_api.connected(fresh_node) as api:
        assert await api.freeze(target, 60) is True
        await fresh_node.daemons.kill(victim)
        await fresh_node.daemons.start(victim)
        await fresh_node.kubelet.wait_ready(HANDLER)
        assert await api.thaw(target) is True
    assert (await fresh_node.kubelet.stats(volume, target))[BYTES].used > 0
    assert await fresh_node.kubelet.expand(volume, target, 128 * MIB) == 128 * MIB
    assert await fresh_node.output("one", target, "cat /data/f") == "kept"
    await fresh_node.runtime.stop("one")
    await fresh_node.unpublish(volume, target)
    await fresh_node.kubelet.unstage(volume)
    assert not [
        each for each in loop.list_named(lambda _: True) if volume.volume_id in each.backing
    ]
    assert mountinfo.at(str(target)) is None
