"""Twenty pods begin while crust is killed, and live on while the kubelet is: each has its volume, nothing is left.

The kubelet is killed while no pod ends: one of 1.36.3 that was killed while pods ended never unstaged 3 of 20 volumes
(docs/operations.md, "Loop devices are left").
"""

import subprocess

import pytest

from tests.support.kubernetes.cluster import Cluster, claim, pod

pytestmark = pytest.mark.timeout(1800)
PODS = [f"pod-{number}" for number in range(20)]


def test_twenty_pods_live_through_kills(cluster: Cluster) -> None:
    kubectl, node = cluster.kubectl, cluster.node
    kubectl.apply(
        *(claim(name, "crust-host") for name in PODS), *(pod(name, name) for name in PODS)
    )
    kubectl.wait("condition=Ready", f"pod/{PODS[0]}")
    # the test runs in the node's PID namespace, so this is its daemon
    subprocess.run(["pkill", "-KILL", "-f", "crust node --config"], check=True)
    kubectl.wait("condition=Ready", *(f"pod/{name}" for name in PODS))
    assert node.mounts_of_volumes() == ["ext4"] * len(PODS)
    for name in PODS:
        kubectl.shell(name, f"echo {name} >/data/file; sync /data/file")

    node.kubelet.end()
    node.kubelet.start()
    kubectl.run("delete", "pod", *PODS)
    assert node.mounts_of_volumes() == []
    kubectl.apply(pod("reader", PODS[7]))
    kubectl.wait("condition=Ready", "pod/reader")
    assert kubectl.shell("reader", "cat /data/file") == PODS[7]

    kubectl.run("delete", "pod", "reader")
    volumes = kubectl.names("persistentvolume")
    assert len(volumes) == len(PODS)
    kubectl.run("delete", "persistentvolumeclaim", *PODS)
    kubectl.gone(*volumes)
    assert list(node.images_of_volumes()) == []
