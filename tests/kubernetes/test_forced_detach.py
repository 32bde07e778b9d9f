"""Kubernetes detaches a volume by force, of a driver that crust wraps: crust refuses while a guest may write to it.

The six minutes after which kube-controller-manager does so (`maxWaitForUnmountDuration`) are no setting.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.support.kubernetes import microvm
from tests.support.kubernetes.attaching_driver import CLASS, AttachingDriver
from tests.support.kubernetes.cluster import Cluster, claim, pod
from tests.support.kubernetes.control_plane import NODE
from tests.support.kubernetes.kubectl import until

pytestmark = pytest.mark.timeout(1500)
FORCED_WITHIN_S = 600
TAINT = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"


@dataclass(frozen=True, slots=True)
class Attached:
    """A volume that a pod's guest has written to. `attachment` is the name of its object, with the kind."""

    cluster: Cluster
    driver: AttachingDriver
    attachment: str
    target: str

    @classmethod
    def started(cls, cluster: Cluster, driver: AttachingDriver) -> "Attached":
        cluster.start(pod("first", "data", runtimeClassName=microvm.HANDLER))
        cluster.in_guest("first", "echo kept >/data/file; sync")
        (attachment,) = cluster.kubectl.names("volumeattachment")
        (target,) = cluster.node.targets_of_volumes()
        return cls(cluster, driver, attachment, target)

    def detach_error(self) -> str:
        """What the attacher wrote of its last attempt."""
        status = self.cluster.kubectl.get(*self.attachment.split("/"))["status"]
        assert status["attached"]
        return str(status["detachError"]["message"])

    def in_guest(self, script: str) -> str:
        """The output of a script in the guest, also if its pod is deleted."""
        return microvm.output(self.target, script)


@pytest.fixture(scope="module")
def driver(cluster: Cluster) -> Iterator[AttachingDriver]:
    started = AttachingDriver(cluster.node.directory / "cloud")
    with started.wrapped(cluster):
        yield started


@pytest.fixture
def attached(cluster: Cluster, driver: AttachingDriver) -> Iterator[Attached]:
    """At the end the next guest reads what the first one wrote, and then nothing is left."""
    kubectl, node = cluster.kubectl, cluster.node
    kubectl.apply(claim("data", CLASS))
    yield Attached.started(cluster, driver)
    cluster.start(pod("next", "data", runtimeClassName=microvm.HANDLER))
    assert cluster.in_guest("next", "cat /data/file") == "kept\nmore"
    kubectl.run("delete", "pod", "next")
    cluster.remove("data")
    assert (node.mounts_of_volumes(), microvm.sandboxes()) == ([], [])


def test_forced_detach_is_refused_until_node_is_out_of_service(attached: Attached) -> None:
    """The kubelet that comes back was told meanwhile that the volume is not attached, and does not list it."""
    kubectl, node, driver = attached.cluster.kubectl, attached.cluster.node, attached.driver
    kubectl.wait("jsonpath={.status.attached}=true", attached.attachment)
    (in_use,) = until(lambda: kubectl.get("node", NODE)["status"].get("volumesInUse"))
    assert in_use.startswith("kubernetes.io/csi/cloud.csi.example.org^/subscriptions/")
    node.kubelet.end()
    kubectl.run("delete", "pod", "first", "--force", "--grace-period=0")
    patient = replace(kubectl, within_s=FORCED_WITHIN_S)
    patient.wait("jsonpath={.status.detachError.message}", attached.attachment)
    assert "UsedOnNode" in attached.detach_error()
    assert "ControllerUnpublishVolume" not in driver.calls()
    attached.in_guest("echo more >>/data/file; sync")

    node.kubelet.start()
    until(lambda: "VolumeUseUnknown" in attached.detach_error())
    until(lambda: driver.calls()[-1] == "NodeUnstageVolume")
    assert "ControllerUnpublishVolume" not in driver.calls()
    assert (node.mounts_of_volumes(), microvm.sandboxes()) == ([], [])

    node.kubelet.end()
    kubectl.wait("condition=Ready=Unknown", f"node/{NODE}")
    kubectl.run("taint", "node", NODE, TAINT)
    kubectl.gone(attached.attachment)
    assert driver.calls()[-1] == "ControllerUnpublishVolume"
    node.kubelet.start()
    kubectl.wait("condition=Ready", f"node/{NODE}")
    kubectl.run("taint", "node", NODE, f"{TAINT}-")
