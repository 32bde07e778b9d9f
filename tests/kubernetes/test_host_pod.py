"""A pod whose volume the host mounts, under a real kubelet: from the claim to the deletion of the data."""

from tests.support.kubernetes.cluster import Cluster, claim, pod


def test_host_pod_keeps_data_until_its_claim_is_deleted(cluster: Cluster) -> None:
    kubectl = cluster.kubectl
    kubectl.apply(claim("data", "crust-host"), pod("first", "data"))
    kubectl.wait("condition=Ready", "pod/first")
    assert cluster.node.mounts_of_volumes() == ["ext4"]
    kubectl.shell("first", "echo written >/data/file")
    kubectl.run("delete", "pod", "first")
    assert cluster.node.mounts_of_volumes() == []
    kubectl.apply(pod("second", "data"))
    kubectl.wait("condition=Ready", "pod/second")
    assert kubectl.shell("second", "cat /data/file") == "written"
    kubectl.run("delete", "pod", "second")
    (volume,) = kubectl.names("persistentvolume")
    kubectl.run("delete", "persistentvolumeclaim", "data")
    kubectl.gone(volume)
    assert list(cluster.node.images_of_volumes()) == []


def test_csinode_names_the_driver_and_its_topology(cluster: Cluster) -> None:
    (driver,) = cluster.kubectl.get("csinode", "node-1")["spec"]["drivers"]
    assert driver["name"] == "block.csi.crust.dev"
    assert driver["topologyKeys"] == ["crust.dev/node"]
