"""The simulated kubelet does what the real one was seen to do, event by event."""

import itertools
import os

import grpc
import pytest

from tests.support.drivers.fake_driver import Failure
from tests.support.kubelet.clock import Clock
from tests.support.kubelet.pending import LONGEST_PAUSE_S, Operation, PendingOperations
from tests.support.kubelet.state import Pod, State, Volume
from tests.unit.support.kubelet.conftest import Simulated

Code = grpc.StatusCode
VOLUME = Volume("pv-1", "vol-1")
POD = Pod("pod-1", (VOLUME,))
LIFE = ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"]


def _uncertain(simulated: Simulated) -> None:
    simulated.driver.failures_after["NodePublishVolume"] = Failure(Code.UNAVAILABLE, "lost")


async def _run(simulated: Simulated, pod: Pod = POD) -> None:
    simulated.kubelet.add(pod)
    await simulated.kubelet.until(lambda: simulated.kubelet.settled, within_s=5)


async def _fail_always(simulated: Simulated, method: str, code: grpc.StatusCode) -> None:
    """Turn once with the method failing."""
    simulated.driver.failures[method] = Failure(code, "no")
    await simulated.kubelet.turn()


async def test_pod_passes_the_four_calls_in_order(simulated: Simulated, root: str) -> None:
    await _run(simulated)
    assert simulated.runtime.containers == {"pod-1"}
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.until(lambda: simulated.kubelet.empty, within_s=5)
    assert simulated.methods() == LIFE
    assert simulated.kubelet.actual.volumes == {}
    assert os.listdir(f"{root}/kubelet/pods") == []
    assert os.listdir(f"{root}/kubelet/plugins/kubernetes.io/csi/csi.example.com") == []


async def test_capabilities_are_asked_for_each_operation(simulated: Simulated) -> None:
    await _run(simulated)
    asked = [call.method for call in simulated.driver.calls]
    assert asked == [
        "NodeGetCapabilities", "NodeStageVolume", "NodeGetCapabilities", "NodePublishVolume",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [Code.CANCELLED, Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.ABORTED],
)  # fmt: skip
async def test_first_publish_with_non_final_code_is_uncertain_and_is_unpublished_with_its_pod(
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
async def test_final_code_after_an_uncertain_publish_is_forgotten_and_never_unpublished(
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


def test_pauses_grow_from_half_a_second_to_two_minutes() -> None:
    clock = Clock()
    pending = PendingOperations(clock)
    pauses = []
    for _ in range(12):
        operation = pending.begin("pv-1", "pod-1", "volume_unmount")
        assert isinstance(operation, Operation)
        assert pending.begin("pv-1", "pod-1", "volume_unmount") is None
        pending.end(operation, failed=True)
        assert pending.begin("pv-1", "pod-1", "volume_unmount") is None
        pauses.append(operation.pause_s)
        clock.advance(operation.pause_s + 0.1)
    assert pauses[:5] == [0.5, 1, 2, 4, 8]
    assert pauses[-1] == LONGEST_PAUSE_S


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
    answered = [each.at_s for each in simulated.kubelet.journal if "Unpublish" in each.method]
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


async def test_target_that_holds_something_is_never_torn_down(simulated: Simulated) -> None:
    await _run(simulated)
    simulated.driver.leaves = "mountInfo.json"
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


async def test_restart_without_vol_data_leaves_the_volume(simulated: Simulated) -> None:
    await _run(simulated)
    target = simulated.kubelet.disk.target("pod-1", "pv-1")
    os.unlink(f"{os.path.dirname(target)}/vol_data.json")
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.restart()
    for _ in range(20):
        await simulated.kubelet.turn()
    assert "NodeUnpublishVolume" not in simulated.methods()


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


async def test_failing_statistics_change_nothing(simulated: Simulated) -> None:
    await _run(simulated)
    for _ in range(3):
        simulated.driver.failures["NodeGetVolumeStats"] = Failure(Code.FAILED_PRECONDITION, "no")
        simulated.kubelet.clock.advance(60)
        await simulated.kubelet.turn()
    assert len(simulated.driver.called("NodeGetVolumeStats")) == 3
    assert simulated.kubelet.settled


async def test_sub_path_is_bound_and_cleaned_before_unpublish(simulated: Simulated) -> None:
    await _run(simulated, Pod("pod-1", (VOLUME,), {"pv-1": "a/b"}))
    target = simulated.kubelet.disk.target("pod-1", "pv-1")
    bound = simulated.kubelet.disk.sub_path("pod-1", "pv-1")
    assert simulated.mount_points.binds == {bound: f"{target}/a/b"}
    os.removedirs(f"{target}/a/b")
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.turn()
    assert simulated.mount_points.binds == {}


async def test_sub_path_that_cannot_be_made_stops_the_container(simulated: Simulated) -> None:
    simulated.kubelet.add(Pod("pod-1", (VOLUME,), {"pv-1": "file/below"}))
    target = simulated.kubelet.disk.target("pod-1", "pv-1")
    os.makedirs(target)
    open(f"{target}/file", "w").close()
    for _ in range(300):
        await simulated.kubelet.turn()
    assert simulated.runtime.containers == set()
    assert simulated.kubelet.actual.volumes["pv-1"].state_for("pod-1") is State.MOUNTED
