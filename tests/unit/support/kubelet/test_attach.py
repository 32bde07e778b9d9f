"""attachRequired: who attaches and detaches when, and what the node's calls get of it."""

from collections.abc import AsyncIterator

import grpc
import pytest

from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Failure
from tests.support.kubelet.attach import FORCE_AFTER_S
from tests.support.kubelet.attaching_controller import AttachingController
from tests.support.kubelet.kubelet import Kubelet
from tests.support.kubelet.mount_points import FakeMountPoints
from tests.support.kubelet.pods import PlainContainers
from tests.support.kubelet.state import Pod, Volume
from tests.unit.support.kubelet.conftest import DRIVER, MountingDriver

POD = Pod("pod-1", (Volume("pv-1", "vol-1"),))


class Node:
    """A kubelet, its driver, and the vendor's controller."""

    def __init__(self, root: str, *, force_after_s: float | None = None) -> None:
        self.forces = force_after_s is not None
        self.driver = MountingDriver()
        self.controller = AttachingController()
        self.kubelet = Kubelet(
            root=f"{root}/kubelet",
            driver=DRIVER,
            socket=f"{root}/csi.sock",
            mount_points=FakeMountPoints(lambda path: path in self.driver.published),
            runtime=PlainContainers(),
            controller=self.controller,
            force_detach_after_s=force_after_s,
        )


@pytest.fixture(params=[None, FORCE_AFTER_S])
async def node(root: str, request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    """With a driver that serves."""
    there = Node(root, force_after_s=request.param)
    async with fake_driver.serving(there.driver, f"{root}/csi.sock"):
        yield there


async def test_volume_is_attached_before_it_is_staged_and_detached_after_it_is_unstaged(
    node: Node,
) -> None:
    node.controller.fails = 2
    node.kubelet.add(POD)
    await node.kubelet.turn()
    assert node.driver.calls == [], "not attached yet"
    await node.kubelet.until(lambda: node.kubelet.settled, within_s=30)
    for method in ("NodeStageVolume", "NodePublishVolume"):
        (call,) = node.driver.called(method)
        assert dict(call.request.publish_context) == {"device": "vol-1"}
    await node.kubelet.delete("pod-1")
    await node.kubelet.until(lambda: not node.kubelet.actual.volumes, within_s=5)
    assert node.controller.attached == {"vol-1"}, "until the node's next status"
    await node.kubelet.until(lambda: node.kubelet.empty, within_s=30)
    assert node.controller.attached == set()


async def test_volume_that_cannot_be_unpublished_is_detached_by_force_only_where_that_is_on(
    node: Node,
) -> None:
    node.kubelet.add(POD)
    await node.kubelet.until(lambda: node.kubelet.settled, within_s=30)
    held = Failure(grpc.StatusCode.FAILED_PRECONDITION, "a sandbox has it")
    node.driver.failing["NodeUnpublishVolume"] = held
    await node.kubelet.delete("pod-1")
    await node.kubelet.turn()
    # the pod object stays as long as its volume is mounted; a person deletes it by force
    del node.kubelet.pods["pod-1"]
    await node.kubelet.turn()
    node.kubelet.clock.advance(FORCE_AFTER_S + 1)
    await node.kubelet.turn()
    assert node.controller.attached == (set() if node.forces else {"vol-1"})


async def test_volume_of_a_running_pod_is_not_detached_across_a_restart_of_the_kubelet(
    node: Node,
) -> None:
    node.kubelet.add(POD)
    await node.kubelet.until(lambda: node.kubelet.settled, within_s=30)
    await node.kubelet.restart()
    node.kubelet.clock.advance(60)
    for _ in range(3):
        await node.kubelet.turn()
    assert node.controller.attached == {"vol-1"}
