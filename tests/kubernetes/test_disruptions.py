"""What an operator, or a failure, does to pods and nodes: each ends with the data there and nothing left."""

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.kubernetes import microvm
from tests.support.kubernetes.cluster import DAEMONSET, OF_CRUST, Cluster, claim, pod
from tests.support.kubernetes.control_plane import NODE
from tests.support.kubernetes.kubectl import Kubectl, until
from tests.support.kubernetes.writers import Writers
from tests.support.pages import page_blocks

HANGS_WITHIN_S = 900
"""It is only waited for in a failure."""
NOW = ("--force", "--grace-period=0")


@pytest.fixture
def written(cluster: Cluster) -> Iterator[Cluster]:
    """With a pod that has written to its volume; at the end the next pod reads it, and then nothing is left."""
    kubectl, node = cluster.kubectl, cluster.node
    kubectl.apply(claim("data", "crust-host"))
    cluster.start(pod("first", "data"))
    kubectl.shell("first", "echo kept >/data/file; sync /data/file")
    yield cluster
    cluster.start(pod("next", "data"))
    assert kubectl.shell("next", "cat /data/file") == "kept"
    assert node.mounts_of_volumes() == ["ext4"]
    kubectl.run("delete", "pod", "next")
    cluster.remove("data")
    assert (node.mounts_of_volumes(), list(node.images_of_volumes())) == ([], [])


def runs_again(kubectl: Kubectl, name: str) -> bool:
    """Whether the container of a pod was started a second time."""
    (status,) = kubectl.get("pod", name)["status"]["containerStatuses"]
    return status["restartCount"] == 1 and "running" in status["state"]


def container_of_crust(kubectl: Kubectl, name: str) -> str:
    """The id of the container of crust that runs in a pod; empty if none does."""
    statuses = kubectl.get(*name.split("/"), OF_CRUST[1])["status"]["containerStatuses"]
    (found,) = (each for each in statuses if each["name"] == "crust")
    return str(found["containerID"]) if "running" in found["state"] else ""


def drain(kubectl: Kubectl) -> None:
    kubectl.run("drain", NODE, "--ignore-daemonsets", "--force", "--delete-emptydir-data")


def test_forced_deletion_of_pod_keeps_its_data(written: Cluster) -> None:
    written.kubectl.run("delete", "pod", "first", *NOW)


def test_forced_deletion_while_kubelet_is_away_keeps_data(written: Cluster) -> None:
    written.node.kubelet.end()
    written.kubectl.run("delete", "pod", "first", *NOW)
    assert written.node.mounts_of_volumes() == ["ext4"]
    written.node.kubelet.start()


def test_drain_unmounts_and_keeps_data(written: Cluster) -> None:
    kubectl = written.kubectl
    drain(kubectl)
    assert written.node.mounts_of_volumes() == []
    kubectl.run("uncordon", NODE)


def test_drain_ends_guest_and_next_pods_have_its_data(cluster: Cluster) -> None:
    kubectl = cluster.kubectl
    kubectl.apply(claim("data", "by-runtime-class"))
    cluster.start(pod("first", "data", runtimeClassName=microvm.HANDLER))
    cluster.in_guest("first", "echo kept >/data/file; sync")
    drain(kubectl)
    assert (cluster.node.mounts_of_volumes(), microvm.sandboxes()) == ([], [])
    kubectl.run("uncordon", NODE)
    for where in ({}, {"runtimeClassName": microvm.HANDLER}):
        cluster.start(pod("next", "data", **where))
        assert cluster.inside("next", "cat /data/file") == "kept"
        kubectl.run("delete", "pod", "next")
    cluster.remove("data")


def test_rolling_update_leaves_pods_alone(written: Cluster) -> None:
    kubectl = written.kubectl
    kubectl.apply(claim("deferred", "by-runtime-class"))
    cluster_pod = pod("deferred", "deferred", runtimeClassName=microvm.HANDLER)
    written.start(cluster_pod)
    uid = kubectl.get("pod", "deferred")["metadata"]["uid"]
    before = kubectl.names("pod", *OF_CRUST)
    kubectl.run("rollout", "restart", DAEMONSET, OF_CRUST[1])
    written.rolled_out()
    assert kubectl.names("pod", *OF_CRUST) != before
    assert sorted(written.node.mounts_of_volumes()) == ["ext4", "tmpfs"]
    assert kubectl.shell("first", "cat /data/file") == "kept"
    assert kubectl.get("pod", "deferred")["metadata"]["uid"] == uid
    kubectl.run("delete", "pod", "first", "deferred")
    assert (written.node.mounts_of_volumes(), microvm.sandboxes()) == ([], [])
    written.remove("deferred")


def test_label_off_and_on_leaves_writers_alone(writers: Writers) -> None:
    """As docs/pool-disk.md stops and starts crust on one node."""
    cluster, kubectl = writers.cluster, writers.cluster.kubectl
    (block,) = (each for each in page_blocks.blocks("pool-disk.md") if "kubectl label" in each)
    off, on = block.splitlines()
    cluster.follow(off)
    kubectl.gone("pods", *OF_CRUST)
    writers.assert_go_on()
    cluster.follow(on)
    kubectl.wait("condition=Ready", *until(lambda: kubectl.names("pod", *OF_CRUST)), OF_CRUST[1])
    writers.assert_go_on()


@pytest.mark.timeout(1500)
def test_daemon_that_hangs_is_replaced_under_writers(writers: Writers) -> None:
    """Its liveness probe ends it."""
    kubectl = writers.cluster.kubectl
    (name,) = kubectl.names("pod", *OF_CRUST)
    hung = container_of_crust(kubectl, name)
    # the test runs in the node's PID namespace, so this is its daemon, and not the process that waits for it
    subprocess.run(["pkill", "-STOP", "-f", "bin/crust node --config"], check=True)
    until(lambda: container_of_crust(kubectl, name) not in ("", hung), HANGS_WITHIN_S)
    kubectl.wait("condition=Ready", name, OF_CRUST[1])
    writers.assert_go_on()


def test_out_of_service_node_keeps_data(written: Cluster) -> None:
    """The node is down, and its taint says so: pods are deleted without their kubelet, which then finds them gone."""
    kubectl, node = written.kubectl, written.node
    taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    node.kubelet.end()
    kubectl.wait("condition=Ready=Unknown", f"node/{NODE}")
    kubectl.run("taint", "node", NODE, taint)
    kubectl.gone("pod/first")
    assert node.mounts_of_volumes() == ["ext4"]  # nobody has unmounted it
    node.kubelet.start()
    kubectl.wait("condition=Ready", f"node/{NODE}")
    kubectl.run("taint", "node", NODE, f"{taint}-")


def test_reboot_keeps_data_of_guest_and_host(written: Cluster) -> None:
    kubectl = written.kubectl
    kubectl.apply(claim("deferred", "by-runtime-class"))
    written.start(pod("deferred", "deferred", runtimeClassName=microvm.HANDLER))
    written.in_guest("deferred", "echo kept >/data/file; sync")
    written.node.reboot()
    until(lambda: all(runs_again(kubectl, name) for name in ("first", "deferred")))
    assert sorted(written.node.mounts_of_volumes()) == ["ext4", "tmpfs"]
    assert kubectl.shell("first", "cat /data/file") == "kept"
    assert written.in_guest("deferred", "cat /data/file") == "kept"
    kubectl.run("delete", "pod", "first", "deferred")
    written.remove("deferred")
