"""A claim that asks for more gets it: while its pod runs, on the host or in a microVM, and with its next pod.

csi-resizer marks the size.
"""

import json
from typing import Any

from tests.support.kubernetes import microvm
from tests.support.kubernetes.cluster import Cluster, claim, pod

MORE = "640Mi"
ASKED = {"spec": {"resources": {"requests": {"storage": MORE}}}}


def mib_in(cluster: Cluster, name: str) -> int:
    """The size of the filesystem that a pod sees."""
    blocks, size = cluster.inside(name, "stat -fc '%b %S' /data").split()
    return int(blocks) * int(size) >> 20


def written(cluster: Cluster, storage_class: str = "crust-xfs", **spec: Any) -> None:
    cluster.kubectl.apply(claim("grows", storage_class))
    cluster.start(pod("before", "grows", **spec))
    cluster.inside("before", "echo kept >/data/file; sync")
    assert mib_in(cluster, "before") < 320


def assert_grown(cluster: Cluster, name: str) -> None:
    """The pod, which is then removed with its claim, has more room and the old data."""
    kubectl = cluster.kubectl
    kubectl.wait(f"jsonpath={{.status.capacity.storage}}={MORE}", "pvc/grows")
    assert mib_in(cluster, name) > 480
    assert cluster.inside(name, "cat /data/file") == "kept"
    kubectl.run("delete", "pod", name)
    cluster.remove("grows")


def test_claim_grows_under_its_pod(cluster: Cluster) -> None:
    written(cluster)
    cluster.kubectl.run("patch", "pvc", "grows", f"--patch={json.dumps(ASKED)}")
    assert_grown(cluster, "before")


def test_claim_grows_in_its_microvm(cluster: Cluster) -> None:
    written(cluster, "by-runtime-class", runtimeClassName=microvm.HANDLER)
    cluster.kubectl.run("patch", "pvc", "grows", f"--patch={json.dumps(ASKED)}")
    assert_grown(cluster, "before")


def test_claim_without_pod_grows_with_next_pod(cluster: Cluster) -> None:
    written(cluster)
    cluster.kubectl.run("delete", "pod", "before")
    cluster.kubectl.run("patch", "pvc", "grows", f"--patch={json.dumps(ASKED)}")
    cluster.start(pod("after", "grows"))
    assert_grown(cluster, "after")
