"""docs/kubernetes.md, "Uninstall", where crust runs as pods: in the order of the page, and under pods that write."""

import os
import re
from collections.abc import Iterator

import pytest

from tests.support.kubernetes import cluster as clusters
from tests.support.kubernetes import microvm
from tests.support.kubernetes.cluster import OF_CRUST, Cluster
from tests.support.kubernetes.control_plane import NODE
from tests.support.kubernetes.kubectl import until
from tests.support.kubernetes.writers import PODS, Writers
from tests.support.pages import page_blocks

pytestmark = pytest.mark.timeout(1500)
DRIVER = "block.csi.crust.dev"
PLUGIN = f"/var/lib/kubelet/plugins/{DRIVER}"
OF_CLUSTER = ("csidriver", "storageclass", "clusterrole", "clusterrolebinding")


def command(begins: str) -> str:
    """The command of the page that begins so."""
    section = (
        page_blocks.text("kubernetes.md").partition("\n## Uninstall\n")[2].partition("\n## ")[0]
    )
    (found,) = re.findall(rf"`({begins} [^`]+)`", section)
    return str(found)


def uninstall(cluster: Cluster) -> None:
    cluster.follow(command("helm uninstall"))
    cluster.kubectl.gone("pods", *OF_CRUST)


@pytest.fixture
def installed_again(cluster: Cluster) -> Iterator[Cluster]:
    """At the end crust is there as before."""
    yield cluster
    install_again(cluster)


def install_again(cluster: Cluster) -> None:
    cluster.kubectl.run("label", "--overwrite", "node", NODE, "crust.dev/enabled=true")
    (line,) = (line for line in clusters.steps()[1].splitlines() if line.startswith("helm install"))
    cluster.follow(line)
    cluster.upgrade(clusters.values())


def test_uninstall_leaves_pool_and_empty_directory_of_driver(installed_again: Cluster) -> None:
    cluster = installed_again
    shown = (cluster.crust("pool", "--output=name"), cluster.crust("volumes", "--output=name"))
    assert "".join(shown).strip() == ""
    uninstall(cluster)
    cluster.follow(command("kubectl label"))
    left = {kind: cluster.kubectl.names(kind) for kind in OF_CLUSTER}
    assert [name for names in left.values() for name in names if "crust" in name] == []
    assert os.listdir(PLUGIN) == []
    assert "pool.json" in os.listdir("/var/lib/crust/block")
    assert [each for each in os.listdir("/run/crust/volumes") if not each.startswith(".")] == []


def test_pods_that_outlive_crust_end_when_it_is_back(writers: Writers) -> None:
    """Their guest and their mount go on; deleted, they stay in Terminating, because a kubelet cannot unpublish."""
    cluster, kubectl = writers.cluster, writers.cluster.kubectl
    uninstall(cluster)
    writers.assert_go_on()
    kubelet = cluster.node.kubelet
    begins = len(kubelet.text())
    kubectl.run("delete", "pod", *PODS, "--wait=false")
    until(lambda: f"driver name {DRIVER} not found" in kubelet.text()[begins:])
    assert writers.mounts() == ["ext4", "tmpfs"]
    assert all(kubectl.get("pod", name)["metadata"]["deletionTimestamp"] for name in PODS)
    install_again(cluster)
    kubectl.gone(*(f"pod/{name}" for name in PODS))
    assert (writers.mounts(), microvm.sandboxes()) == ([], [])
