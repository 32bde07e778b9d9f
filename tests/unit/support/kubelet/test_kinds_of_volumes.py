"""The simulated kubelet with inline, attached and raw block volumes."""

import hashlib
import os
from collections.abc import AsyncIterator

import grpc
import pytest

from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Failure
from tests.support.drivers.mounting_driver import MountingDriver
from tests.support.kubelet.attach import FORCE_AFTER_S
from tests.support.kubelet.attaching_controller import AttachingController
from tests.support.kubelet.kubelet import Kubelet
from tests.support.kubelet.mount_points import FakeMountPoints
from tests.support.kubelet.pods import PlainContainers
from tests.support.kubelet.state import Pod, State, Volume
from tests.unit.support.kubelet.conftest import DRIVER, Simulated

POD = Pod("pod-1", (Volume("pv-1", "vol-1"),))


class Node:
    """A kubelet, its driver, and the vendor's controller."""

    def __init__(self, root: str, *, force_after_s: float | None = None) -> None:
        self.forces = force_after_s is not None
        self.driver = MountingDriver(f"{root}/sizes.json")
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
    there = Node(root, force_after_s=request.param)
    async with fake_driver.serving(there.driver, f"{root}/csi.sock"):
        yield there


async def test_attach_comes_before_the_stage_and_detach_after_unstage(node: Node) -> None:
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


async def test_forced_detach_of_a_mounted_volume_needs_the_switch(node: Node) -> None:
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


async def test_restarted_kubelet_detaches_no_volume_of_a_running_pod(node: Node) -> None:
    node.kubelet.add(POD)
    await node.kubelet.until(lambda: node.kubelet.settled, within_s=30)
    await node.kubelet.restart()
    node.kubelet.clock.advance(60)
    for _ in range(3):
        await node.kubelet.turn()
    assert node.controller.attached == {"vol-1"}


Code = grpc.StatusCode
RAW = Volume("pv-raw", "vol-raw", block=True)
RAW_POD = Pod("pod-1", (RAW,))
BASE = "plugins/kubernetes.io/csi/volumeDevices"
LIFE = ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"]


async def _run(simulated: Simulated) -> None:
    simulated.kubelet.add(RAW_POD)
    await simulated.kubelet.until(lambda: simulated.kubelet.settled, within_s=5)


async def test_raw_volume_is_staged_mapped_and_removed(simulated: Simulated, root: str) -> None:
    await _run(simulated)
    target = f"{root}/kubelet/{BASE}/publish/pv-raw/pod-1"
    mapped = f"{root}/kubelet/{BASE}/pv-raw/dev/pod-1"
    stage, publish = (simulated.driver.called(each)[0].request for each in LIFE[:2])
    assert stage.staging_target_path == f"{root}/kubelet/{BASE}/staging/pv-raw"
    assert publish.staging_target_path == stage.staging_target_path
    assert publish.target_path == target
    assert stage.volume_capability.HasField("block")
    assert publish.volume_capability.HasField("block")
    assert simulated.mount_points.binds == {mapped: target}
    assert simulated.kubelet.disk.block.loops == {mapped}
    link = f"{root}/kubelet/pods/pod-1/volumeDevices/kubernetes.io~csi/pv-raw"
    assert os.readlink(link) == target
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.until(lambda: simulated.kubelet.empty, within_s=5)
    assert simulated.methods() == LIFE
    assert simulated.mount_points.binds == {}
    assert simulated.kubelet.disk.block.loops == set()
    assert sorted(os.listdir(f"{root}/kubelet/{BASE}")) == ["publish", "staging"]


async def test_target_that_stays_keeps_its_device_mapped(simulated: Simulated) -> None:
    await _run(simulated)
    simulated.driver.keeps_raw_targets = True
    await simulated.kubelet.delete("pod-1")
    for _ in range(100):
        await simulated.kubelet.turn()
    assert simulated.methods().count("NodeUnstageVolume") > 1
    assert simulated.kubelet.actual.volumes["pv-raw"].device is State.UNCERTAIN


async def test_raw_expansion_names_the_target_alone(simulated: Simulated, root: str) -> None:
    await _run(simulated)
    simulated.kubelet.resize("pv-raw", 1 << 30)
    await simulated.kubelet.until(lambda: simulated.kubelet.settled, within_s=5)
    (expand,) = simulated.driver.called("NodeExpandVolume")
    assert expand.request.volume_path == f"{root}/kubelet/{BASE}/publish/pv-raw/pod-1"
    assert expand.request.staging_target_path == ""
    assert expand.request.volume_capability.HasField("block")


async def test_raw_statistics_are_asked_at_the_bind(simulated: Simulated, root: str) -> None:
    await _run(simulated)
    simulated.kubelet.clock.advance(60)
    await simulated.kubelet.turn()
    (stats,) = simulated.driver.called("NodeGetVolumeStats")
    assert stats.request.volume_path == f"{root}/kubelet/{BASE}/pv-raw/dev/pod-1"


async def test_linked_raw_volume_is_found_after_a_restart(simulated: Simulated) -> None:
    await _run(simulated)
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.restart()
    await simulated.kubelet.until(lambda: simulated.kubelet.empty, within_s=5)
    assert simulated.methods() == LIFE


async def test_raw_volume_without_a_link_is_lost(simulated: Simulated, root: str) -> None:
    """The publish was lost, so the kubelet has mapped nothing: no directory of the pod names the volume."""
    simulated.driver.failures_after["NodePublishVolume"] = Failure(Code.UNAVAILABLE, "lost")
    simulated.kubelet.add(RAW_POD)
    await simulated.kubelet.turn()
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.restart()
    for _ in range(20):
        await simulated.kubelet.turn()
    assert simulated.methods() == LIFE[:2]
    target = f"{root}/kubelet/{BASE}/publish/pv-raw/pod-1"
    assert simulated.kubelet.disk.block.lost == {target}


INLINE = Volume.inline("pod-1", "scratch", {"size": "1Gi"})
INLINE_POD = Pod("pod-1", (INLINE,))


async def test_inline_volume_is_named_after_its_pod(simulated: Simulated, root: str) -> None:
    simulated.kubelet.add(INLINE_POD)
    await simulated.kubelet.until(lambda: simulated.kubelet.settled, within_s=5)
    (publish,) = simulated.driver.called("NodePublishVolume")
    digest = hashlib.sha256(b"pod-1scratch").hexdigest()
    assert publish.request.volume_id == f"csi-{digest}"
    assert publish.request.staging_target_path == ""
    assert publish.request.volume_context["csi.storage.k8s.io/ephemeral"] == "true"
    assert publish.request.volume_context["size"] == "1Gi"
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.until(lambda: simulated.kubelet.empty, within_s=5)
    assert simulated.methods() == ["NodePublishVolume", "NodeUnpublishVolume"]


async def test_inline_volume_is_unpublished_after_a_restart(simulated: Simulated) -> None:
    simulated.kubelet.add(INLINE_POD)
    await simulated.kubelet.until(lambda: simulated.kubelet.settled, within_s=5)
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.restart()
    await simulated.kubelet.until(lambda: simulated.kubelet.empty, within_s=5)
    assert simulated.methods() == ["NodePublishVolume", "NodeUnpublishVolume"]


async def test_driver_without_ephemeral_is_not_called(simulated: Simulated, root: str) -> None:
    kubelet = Kubelet(
        root=f"{root}/kubelet",
        driver=DRIVER,
        socket=f"{root}/csi.sock",
        mount_points=simulated.mount_points,
        runtime=simulated.runtime,
        lifecycle_modes=frozenset({"Persistent"}),
    )
    kubelet.add(INLINE_POD)
    for _ in range(20):
        await kubelet.turn()
    assert simulated.driver.calls == []
    assert not kubelet.settled
