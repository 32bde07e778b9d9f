"""A claim that asks for more gets it: while its pod runs, and with its next pod. csi-resizer marks the size."""

import json

from tests.support.kubernetes.cluster import Cluster, claim, pod

MORE = "640Mi"
ASKED = {"spec": {"resources": {"requests": {"storage": MORE}}}}


def mib_in(cluster: Cluster, name: str) -> int:
    """The size of the filesystem that a pod sees."""
    return int(cluster.kubectl.shell(name, "df -m --output=size /data | tail -1"))


def written(cluster: Cluster) -> None:
    cluster.kubectl.apply(claim("grows", "crust-xfs"))
    cluster.start(pod("before", "grows"))
    cluster.kubectl.shell("before", "echo kept >/data/file; sync /data/file")
    assert mib_in(cluster, "before") < 320


def assert_grown(cluster: Cluster, name: str) -> None:
    """The pod, which is then removed with its claim, has more room and the old data."""
    kubectl = cluster.kubectl
    kubectl.wait(f"jsonpath={{.status.capacity.storage}}={MORE}", "pvc/grows")
    assert mib_in(cluster, name) > 480
    assert kubectl.shell(name, "cat /data/file") == "kept"
    kubectl.run("delete", "pod", name)
    cluster.remove("grows")


def test_claim_grows_under_its_pod(cluster: Cluster) -> None:
    written(cluster)
    cluster.kubectl.run("patch", "pvc", "grows", f"--patch={json.dumps(ASKED)}")
    assert_grown(cluster, "before")


def test_claim_without_pod_grows_with_next_pod(cluster: Cluster) -> None:
    written(cluster)
    cluster.kubectl.run("delete", "pod", "before")
    cluster.kubectl.run("patch", "pvc", "grows", f"--patch={json.dumps(ASKED)}")
    cluster.start(pod("after", "grows"))
    assert_grown(cluster, "after")
