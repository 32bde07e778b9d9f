"""Raw block volumes: what a kubelet calls, at which paths, and what it maps and removes itself."""

import os

import grpc

from tests.support.drivers.fake_driver import Failure
from tests.support.kubelet.state import Pod, State, Volume
from tests.unit.support.kubelet.conftest import Simulated

Code = grpc.StatusCode
VOLUME = Volume("pv-raw", "vol-raw", block=True)
POD = Pod("pod-1", (VOLUME,))
BASE = "plugins/kubernetes.io/csi/volumeDevices"
LIFE = ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"]


async def _run(simulated: Simulated) -> None:
    simulated.kubelet.add(POD)
    await simulated.kubelet.until(lambda: simulated.kubelet.settled, within_s=5)


async def test_raw_volume_is_staged_published_mapped_and_all_of_it_removed(
    simulated: Simulated, root: str
) -> None:
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


async def test_driver_that_leaves_its_target_keeps_the_device_from_being_unmapped(
    simulated: Simulated,
) -> None:
    await _run(simulated)
    simulated.driver.keeps_raw_targets = True
    await simulated.kubelet.delete("pod-1")
    for _ in range(100):
        await simulated.kubelet.turn()
    assert simulated.methods().count("NodeUnstageVolume") > 1
    assert simulated.kubelet.actual.volumes["pv-raw"].device is State.UNCERTAIN


async def test_expansion_of_a_raw_volume_names_the_target_and_no_staging_path(
    simulated: Simulated, root: str
) -> None:
    await _run(simulated)
    simulated.kubelet.resize("pv-raw", 1 << 30)
    await simulated.kubelet.until(lambda: simulated.kubelet.settled, within_s=5)
    (expand,) = simulated.driver.called("NodeExpandVolume")
    assert expand.request.volume_path == f"{root}/kubelet/{BASE}/publish/pv-raw/pod-1"
    assert expand.request.staging_target_path == ""
    assert expand.request.volume_capability.HasField("block")


async def test_statistics_of_a_raw_volume_are_asked_at_the_kubelets_own_bind(
    simulated: Simulated, root: str
) -> None:
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


async def test_raw_volume_without_a_link_is_lost_by_a_restart(
    simulated: Simulated, root: str
) -> None:
    """The publish was lost, so the kubelet has mapped nothing: no directory of the pod names the volume."""
    simulated.driver.failures_after["NodePublishVolume"] = Failure(Code.UNAVAILABLE, "lost")
    simulated.kubelet.add(POD)
    await simulated.kubelet.turn()
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.restart()
    for _ in range(20):
        await simulated.kubelet.turn()
    assert simulated.methods() == LIFE[:2]
    target = f"{root}/kubelet/{BASE}/publish/pv-raw/pod-1"
    assert simulated.kubelet.disk.block.lost == {target}
