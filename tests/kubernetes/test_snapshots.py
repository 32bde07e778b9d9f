"""Snapshots and groups by csi-snapshotter and snapshot-controller, in the forms that the chart has for them."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.kubernetes import cluster as clusters
from tests.support.kubernetes.cluster import Cluster, claim, pod
from tests.support.kubernetes.kubectl import until

READY = "jsonpath={.status.readyToUse}=true"
OF_GROUP = {"apiVersion": "groupsnapshot.storage.k8s.io/v1", "kind": "VolumeGroupSnapshot"}


@pytest.fixture
def single_node(cluster: Cluster) -> Iterator[Cluster]:
    """The chart's form with groups: one node, and csi-snapshotter without --node-deployment."""
    values = clusters.values()
    values["local"]["singleNode"] = values["snapshots"]["groups"] = True
    cluster.upgrade(values)
    yield cluster
    cluster.upgrade(clusters.values())


def written(cluster: Cluster, name: str) -> None:
    """A claim with a pod that has written its own name."""
    cluster.kubectl.apply(claim(name, "crust-xfs"))
    cluster.start(pod(name, name))
    cluster.kubectl.shell(name, f"echo {name} >/data/file; sync /data/file")


def restored(cluster: Cluster, snapshot: str) -> str:
    """What a pod reads in a claim from a snapshot."""
    source = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": snapshot}
    cluster.kubectl.apply(claim("restored", "crust-xfs", dataSource=source))
    cluster.start(pod("restored", "restored"))
    read = cluster.kubectl.shell("restored", "cat /data/file")
    cluster.kubectl.run("delete", "pod", "restored")
    cluster.remove("restored")
    return read


def snapshot_of(name: str) -> dict[str, Any]:
    """Of the claim of this name."""
    source = {"persistentVolumeClaimName": name}
    return {
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshot",
        "metadata": {"name": name},
        "spec": {"volumeSnapshotClassName": "crust", "source": source},
    }


def test_snapshot_restores_data_of_its_moment(cluster: Cluster) -> None:
    kubectl = cluster.kubectl
    written(cluster, "source")
    kubectl.apply(snapshot_of("source"))
    kubectl.wait(READY, "volumesnapshot/source")
    kubectl.shell("source", "echo later >/data/file; sync /data/file")
    assert restored(cluster, "source") == "source"
    assert kubectl.shell("source", "cat /data/file") == "later"
    kubectl.run("delete", "volumesnapshot", "source")
    kubectl.run("delete", "pod", "source")
    cluster.remove("source")
    assert list(cluster.node.images_of_volumes()) == []


def test_group_snapshot_restores_each_member(single_node: Cluster) -> None:
    kubectl, members = single_node.kubectl, ("one", "two")
    for name in members:
        written(single_node, name)
        kubectl.run("label", "pvc", name, "group=both")
    source = {"selector": {"matchLabels": {"group": "both"}}}
    spec = {"volumeGroupSnapshotClassName": "crust", "source": source}
    kubectl.apply({**OF_GROUP, "metadata": {"name": "both"}, "spec": spec})
    kubectl.wait(READY, "volumegroupsnapshot/both")
    snapshots = until(lambda: kubectl.names("volumesnapshot"))
    kubectl.wait(READY, *snapshots)
    found = {restored(single_node, name.partition("/")[2]) for name in snapshots}
    assert found == set(members)
    kubectl.run("delete", "volumegroupsnapshot", "both")
    kubectl.gone(*snapshots)
    kubectl.run("delete", "pod", *members)
    single_node.remove(*members)
    assert list(single_node.node.images_of_volumes()) == []
