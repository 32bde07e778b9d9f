"""The simulated kubelet does what the real one was seen to do, event by event."""

import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Failure, FakeDriver
from tests.support.kubelet.kubelet import Kubelet
from tests.support.kubelet.state import Pod, State, Volume
from tests.support.memory_csi.node import Mounts
from tests.support.nodes.fake_targets import MarkedMounts

DRIVER = "csi.example.com"
Code = grpc.StatusCode
VOLUME = Volume("pv-1", "vol-1")
POD = Pod("pod-1", (VOLUME,))
LIFE = ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"]


class PlainContainers:
    """`kubelet.Runtime` without sandboxes."""

    def __init__(self) -> None:
        self.containers: set[str] = set()

    async def start(self, pod: Pod) -> bool:
        self.containers.add(pod.uid)
        return True

    async def stop_containers(self, pod: Pod) -> None:
        self.containers.discard(pod.uid)


@dataclass
class Simulated:
    """A kubelet, and the driver that it calls."""

    kubelet: Kubelet
    driver: FakeDriver
    runtime: PlainContainers

    def methods(self, handle: str = "") -> list[str]:
        """What the driver was asked, less capabilities."""
        return [
            call.method
            for call in self.driver.calls
            if call.method != "NodeGetCapabilities" and call.request.volume_id.startswith(handle)
        ]


@pytest.fixture
async def simulated(short_dir: Path) -> AsyncIterator[Simulated]:
    """A kubelet whose driver serves; a published target is a mount point."""
    driver, runtime = FakeDriver(mounts=MarkedMounts()), PlainContainers()
    kubelet = Kubelet(
        root=f"{short_dir}/kubelet",
        driver=DRIVER,
        socket=f"{short_dir}/csi.sock",
        is_mount_point=lambda path: path in driver.published,
        runtime=runtime,
    )
    async with fake_driver.serving(driver, f"{short_dir}/csi.sock"):
        yield Simulated(kubelet, driver, runtime)


def _uncertain(simulated: Simulated) -> None:
    simulated.driver.failures_after["NodePublishVolume"] = Failure(Code.UNAVAILABLE, "lost")


async def _run(simulated: Simulated, pod: Pod = POD) -> None:
    simulated.kubelet.add(pod)
    await simulated.kubelet.until(lambda: simulated.kubelet.settled, within_s=5)


async def _fail_always(simulated: Simulated, method: str, code: grpc.StatusCode) -> None:
    """Turn once with the method failing."""
    simulated.driver.failures[method] = Failure(code, "no")
    await simulated.kubelet.turn()


async def test_pod_passes_the_four_calls_in_order(simulated: Simulated, short_dir: Path) -> None:
    await _run(simulated)
    assert simulated.runtime.containers == {"pod-1"}
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.until(lambda: simulated.kubelet.empty, within_s=5)
    assert simulated.methods() == LIFE
    assert simulated.kubelet.actual.volumes == {}
    assert os.listdir(f"{short_dir}/kubelet/pods") == []
    assert os.listdir(f"{short_dir}/kubelet/plugins/kubernetes.io/csi/csi.example.com") == []


@pytest.mark.parametrize(
    "code",
    [Code.CANCELLED, Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.ABORTED],
)  # fmt: skip
async def test_uncertain_first_publish_is_unpublished_with_its_pod(
    simulated: Simulated, code: grpc.StatusCode
) -> None:
    simulated.kubelet.add(POD)
    await _fail_always(simulated, "NodePublishVolume", code)
    assert simulated.kubelet.actual.volumes["pv-1"].state_for("pod-1") is State.UNCERTAIN
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.until(lambda: simulated.kubelet.empty, within_s=5)
    assert simulated.methods() == LIFE


@pytest.mark.parametrize(
    "code",
    [Code.FAILED_PRECONDITION, Code.INTERNAL, Code.NOT_FOUND, Code.INVALID_ARGUMENT,
     Code.ALREADY_EXISTS, Code.UNKNOWN, Code.DATA_LOSS, Code.UNIMPLEMENTED],
)  # fmt: skip
async def test_final_code_after_uncertain_publish_is_never_unpublished(
    simulated: Simulated, code: grpc.StatusCode
) -> None:
    _uncertain(simulated)
    simulated.kubelet.add(POD)
    await simulated.kubelet.turn()
    simulated.kubelet.clock.advance(1)
    await _fail_always(simulated, "NodePublishVolume", code)
    await simulated.kubelet.delete("pod-1")
    for _ in range(50):
        await simulated.kubelet.turn()
    assert "NodeUnpublishVolume" not in simulated.methods()
    assert len(simulated.driver.published) == 1, "the leak that a final code makes"


async def test_failing_capabilities_make_the_kubelet_forget(simulated: Simulated) -> None:
    _uncertain(simulated)
    simulated.kubelet.add(POD)
    await simulated.kubelet.turn()
    simulated.kubelet.clock.advance(1)
    await _fail_always(simulated, "NodeGetCapabilities", Code.UNAVAILABLE)
    assert simulated.kubelet.actual.forgotten == ["pv-1"]
    assert simulated.kubelet.actual.volumes["pv-1"].state_for("pod-1") is State.NOT_MOUNTED


async def test_republish_that_fails_leaves_a_mounted_volume_mounted(simulated: Simulated) -> None:
    volume = Volume("pv-1", "vol-1", republish=True)
    await _run(simulated, Pod("pod-1", (volume,)))
    simulated.driver.failures["NodePublishVolume"] = Failure(Code.INTERNAL, "no")
    simulated.kubelet.clock.advance(30)
    await simulated.kubelet.turn()
    assert simulated.kubelet.actual.volumes["pv-1"].state_for("pod-1") is State.MOUNTED
    simulated.kubelet.clock.advance(1)
    await simulated.kubelet.turn()
    published = simulated.driver.called("NodePublishVolume")
    tokens = [
        call.request.volume_context["csi.storage.k8s.io/serviceAccount.tokens"]
        for call in published
    ]
    assert len(tokens) == len(set(tokens)) == 3


async def test_unpublish_is_retried_at_once_while_a_pod_waits(simulated: Simulated) -> None:
    await _run(simulated)
    await simulated.kubelet.delete("pod-1")
    simulated.kubelet.add(Pod("pod-2", (VOLUME,)))
    begun_s = simulated.kubelet.clock.now_s
    while simulated.kubelet.clock.now_s < begun_s + 10:
        simulated.driver.failures["NodeUnpublishVolume"] = Failure(Code.FAILED_PRECONDITION, "held")
        simulated.driver.failures["NodePublishVolume"] = Failure(Code.FAILED_PRECONDITION, "held")
        await simulated.kubelet.turn()
    assert 40 <= len(simulated.driver.called("NodeUnpublishVolume")) <= 60


async def test_unpublish_backs_off_while_nobody_waits(simulated: Simulated) -> None:
    await _run(simulated)
    await simulated.kubelet.delete("pod-1")
    begun_s = simulated.kubelet.clock.now_s
    while simulated.kubelet.clock.now_s < begun_s + 40:
        simulated.driver.failures["NodeUnpublishVolume"] = Failure(Code.FAILED_PRECONDITION, "held")
        await simulated.kubelet.turn()
    answered = [answer.at_s for answer in simulated.kubelet.journal if "Unpublish" in answer.method]
    pauses = [round(later - sooner) for sooner, later in itertools.pairwise(answered)]
    assert pauses == [1, 1, 2, 4, 8, 16]


async def test_volume_is_unstaged_when_its_last_pod_is_gone(simulated: Simulated) -> None:
    volume = Volume("pv-1", "vol-1", readonly=True)
    await _run(simulated, Pod("pod-1", (volume,)))
    await _run(simulated, Pod("pod-2", (volume,)))
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.until(lambda: "pod-1" not in simulated.kubelet.pods, within_s=5)
    assert "NodeUnstageVolume" not in simulated.methods()
    await simulated.kubelet.delete("pod-2")
    await simulated.kubelet.until(lambda: simulated.kubelet.empty, within_s=5)
    assert simulated.methods().count("NodeStageVolume") == 1
    assert simulated.methods()[-1] == "NodeUnstageVolume"


class LeavesAFile(Mounts):
    """An unpublish leaves a file in the target."""

    def unpublish(self, request: csi_pb2.NodeUnpublishVolumeRequest) -> None:
        Path(request.target_path, "mountInfo.json").touch()


async def test_target_that_holds_something_is_never_torn_down(simulated: Simulated) -> None:
    await _run(simulated)
    simulated.driver.node.mounts = LeavesAFile()
    await simulated.kubelet.delete("pod-1")
    for _ in range(100):
        await simulated.kubelet.turn()
    assert "pod-1" in simulated.kubelet.pods
    assert simulated.kubelet.actual.volumes["pv-1"].state_for("pod-1") is State.UNCERTAIN


async def test_restarted_kubelet_publishes_running_pods_again(simulated: Simulated) -> None:
    await _run(simulated)
    await simulated.kubelet.restart()
    await simulated.kubelet.turn()
    assert simulated.methods() == [*LIFE[:2], *LIFE[:2]]


@pytest.mark.parametrize("mounted", [True, False])
async def test_only_a_mount_point_is_unstaged(simulated: Simulated, *, mounted: bool) -> None:
    await _run(simulated)
    await simulated.kubelet.delete("pod-1")
    if not mounted:
        simulated.driver.published.clear()
    await simulated.kubelet.restart()
    for _ in range(20):
        await simulated.kubelet.turn()
    assert simulated.methods().count("NodeUnpublishVolume") == 1
    assert ("NodeUnstageVolume" in simulated.methods()) is mounted


@pytest.mark.parametrize(
    ("code", "calls"), [(Code.FAILED_PRECONDITION, 1), (Code.UNAVAILABLE, 2), (Code.INTERNAL, 2)]
)
async def test_expansion_refused_as_in_use_is_not_tried_again(
    simulated: Simulated, code: grpc.StatusCode, calls: int
) -> None:
    await _run(simulated)
    simulated.kubelet.resize("pv-1", 1 << 30)
    await _fail_always(simulated, "NodeExpandVolume", code)
    simulated.kubelet.clock.advance(130)
    await simulated.kubelet.turn()
    simulated.kubelet.clock.advance(130)
    await simulated.kubelet.turn()
    assert len(simulated.driver.called("NodeExpandVolume")) == calls
