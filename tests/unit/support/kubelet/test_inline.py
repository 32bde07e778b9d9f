"""Inline ephemeral volumes: no device, no stage, a handle of the pod's own."""

import hashlib

from tests.support.kubelet.kubelet import Kubelet
from tests.support.kubelet.state import Pod, Volume
from tests.unit.support.kubelet.conftest import DRIVER, Simulated

VOLUME = Volume.inline("pod-1", "scratch", {"size": "1Gi"})
POD = Pod("pod-1", (VOLUME,))


async def test_inline_volume_is_published_without_a_stage_and_named_after_its_pod(
    simulated: Simulated, root: str
) -> None:
    simulated.kubelet.add(POD)
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


async def test_inline_volume_is_unpublished_after_a_restart_and_nothing_is_unstaged(
    simulated: Simulated,
) -> None:
    simulated.kubelet.add(POD)
    await simulated.kubelet.until(lambda: simulated.kubelet.settled, within_s=5)
    await simulated.kubelet.delete("pod-1")
    await simulated.kubelet.restart()
    await simulated.kubelet.until(lambda: simulated.kubelet.empty, within_s=5)
    assert simulated.methods() == ["NodePublishVolume", "NodeUnpublishVolume"]


async def test_driver_whose_lifecycle_modes_lack_ephemeral_is_not_called(
    simulated: Simulated, root: str
) -> None:
    kubelet = Kubelet(
        root=f"{root}/kubelet",
        driver=DRIVER,
        socket=f"{root}/csi.sock",
        mount_points=simulated.mount_points,
        runtime=simulated.runtime,
        lifecycle_modes=frozenset({"Persistent"}),
    )
    kubelet.add(POD)
    for _ in range(20):
        await kubelet.turn()
    assert simulated.driver.calls == []
    assert not kubelet.settled
