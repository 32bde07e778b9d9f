"""A pod with a bound volume in a microVM, under a real kubelet and API server: registration, publish and unpublish.

No controller and no scheduler runs, so the test binds the claim and the pod itself; and no container, because
Kubernetes' own fake of a container runtime stands in the place of containerd. `make kubernetes` runs it all.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.core import deferral_keys
from crust.core.settings import OWN_DRIVER
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from tests.support import capabilities, trees
from tests.support.co import Co
from tests.support.kubernetes import microvm
from tests.support.kubernetes.cluster import claim, pod
from tests.support.kubernetes.control_plane import NODE, ControlPlane
from tests.support.kubernetes.daemons import Daemon
from tests.support.kubernetes.images import CHECKOUT
from tests.support.kubernetes.kubectl import Kubectl, until
from tests.support.kubernetes.node import Node

SOCKET = f"/var/lib/kubelet/plugins/{OWN_DRIVER}/csi.sock"
SETTINGS = CHECKOUT / "deploy/crust/node.toml"
CSI_DRIVER = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "CSIDriver",
    "metadata": {"name": OWN_DRIVER},
    "spec": {"attachRequired": False, "podInfoOnMount": True},
}
STAGED = Path("/var/lib/kubelet/plugins/kubernetes.io/csi", OWN_DRIVER)
DEFERRED = {deferral_keys.DEFER: "always", deferral_keys.RUNTIME_HANDLER: microvm.HANDLER}


def crust(directory: Path) -> Daemon:
    """The shipped settings, with a pool."""
    settings = directory / "node.toml"
    text = SETTINGS.read_text(encoding="utf-8").replace("# create_pool", "create_pool")
    settings.write_text(text, encoding="utf-8")
    line = (sys.executable, "-m", "crust", "node", f"--config={settings}", f"--node-name={NODE}")
    return Daemon(line, directory, environment={"PYTHONPATH": str(CHECKOUT)})


@pytest.fixture
def cluster() -> Iterator[tuple[Kubectl, Node]]:
    """API server, and a kubelet beside which crust serves."""
    capabilities.need("mount", "loop", "vm", "kubernetes")
    group = f"crust-tests-{Path(tempfile.gettempdir()).name}"
    with trees.of_mounts("k-") as directory:
        plane, node = ControlPlane(directory), Node(directory, group)
        with (
            node.directories(),
            plane.api_running(),
            node.running(plane),
            crust(directory).running(),
        ):
            plane.admin.run("create", "serviceaccount", "default")
            plane.admin.apply(CSI_DRIVER)
            yield plane.admin, node


async def create() -> csi_pb2.Volume:
    async with channel.connect(SOCKET) as connected:
        return await Co(connected, waits=True).create()


async def delete(volume_id: str) -> None:
    async with channel.connect(SOCKET) as connected:
        await Co(connected).delete(volume_id)


def bind(kubectl: Kubectl, volume: csi_pb2.Volume) -> None:
    """A claim and a PersistentVolume, as the controller manager leaves them."""
    size = str(volume.capacity_bytes)
    kubectl.apply(claim("data", "", size, volumeName="pv"))
    found = kubectl.get("pvc", "data")
    spec = {
        "accessModes": found["spec"]["accessModes"],
        "capacity": {"storage": size},
        "claimRef": {"name": "data", "namespace": "default", "uid": found["metadata"]["uid"]},
        "csi": {
            "driver": OWN_DRIVER,
            "volumeHandle": volume.volume_id,
            "volumeAttributes": {**volume.volume_context, **DEFERRED},
            "fsType": "ext4",
        },
    }
    kubectl.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv"}, "spec": spec}
    )
    bound = json.dumps({"status": {"phase": "Bound", "capacity": {"storage": size}}})
    kubectl.run("patch", "pvc", "data", "--subresource=status", f"--patch={bound}")


def test_bound_claim_is_in_microvm_until_its_pod_ends(cluster: tuple[Kubectl, Node]) -> None:
    kubectl, node = cluster
    kubectl.wait("create", f"csinode/{NODE}")
    until(lambda: OWN_DRIVER in kubectl.run("get", "csinode", NODE, "--output=yaml"))
    volume = asyncio.run(create())
    bind(kubectl, volume)
    kubectl.apply(pod("guest", "data", nodeName=NODE, automountServiceAccountToken=False))
    kubectl.wait("jsonpath={.status.phase}=Running", "pod/guest")
    assert node.mounts_of_volumes() == ["tmpfs"]  # the guard alone
    (target,) = node.targets_of_volumes()
    assert microvm.run("guest", target, "echo kept >/data/file; sync; cat /data/file") == "kept"
    microvm.stop("guest")
    kubectl.run("delete", "pod", "guest")
    assert node.mounts_of_volumes() == []
    until(lambda: not list(STAGED.glob("*")))
    asyncio.run(delete(volume.volume_id))
    assert list(node.images_of_volumes()) == []
