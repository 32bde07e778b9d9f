"""A pod's RuntimeClass decides where its volume is mounted: in its microVM, or on the host."""

import json

from tests.support.kubernetes import microvm
from tests.support.kubernetes.cluster import Cluster, claim, pod
from tests.support.kubernetes.control_plane import NODE
from tests.support.kubernetes.kubectl import Kubectl, until


def used_bytes(kubectl: Kubectl, claim_name: str, at_least: int) -> int:
    """What the kubelet says of the volume of a claim, as soon as it is that much."""
    path = f"/api/v1/nodes/{NODE}/proxy/stats/summary"

    def said() -> int:
        return max(
            (
                volume.get("usedBytes", 0)
                for each in json.loads(kubectl.run("get", f"--raw={path}"))["pods"]
                for volume in each.get("volume", [])
                if volume.get("pvcRef", {}).get("name") == claim_name
            ),
            default=0,
        )

    return until(lambda: found if (found := said()) >= at_least else 0)


def test_runtime_class_decides_between_guest_and_host(cluster: Cluster) -> None:
    kubectl, node = cluster.kubectl, cluster.node
    kubectl.apply(claim("data", "by-runtime-class"))
    cluster.start(pod("guest", "data", runtimeClassName=microvm.HANDLER))
    assert node.mounts_of_volumes() == ["tmpfs"]  # the guard alone
    assert "mounted" in cluster.crust("volumes")
    written = "dd if=/dev/zero of=/data/file bs=1M count=64; sync; stat -fc %T /data"
    assert "ext" in cluster.in_guest("guest", written)
    assert used_bytes(kubectl, "data", at_least=64 << 20) < 128 << 20
    kubectl.run("delete", "pod", "guest")
    assert (node.mounts_of_volumes(), microvm.sandboxes()) == ([], [])

    cluster.start(pod("host", "data"))
    assert node.mounts_of_volumes() == ["ext4"]
    assert kubectl.shell("host", "stat -c %s /data/file") == str(64 << 20)
    kubectl.run("delete", "pod", "host")
    cluster.remove("data")
    assert list(node.images_of_volumes()) == []
