"""docs/kubernetes.md, "Five steps to a pod that has its volume", word by word: the cluster has the first three."""

import re

from tests.support.kubernetes import cluster as clusters
from tests.support.kubernetes.cluster import OF_CRUST, Cluster
from tests.support.kubernetes.kubectl import until


def test_five_steps_lead_to_pod_with_volume_in_guest(installed: Cluster) -> None:
    kubectl = installed.kubectl
    objects, look = clusters.steps()[3:]
    kubectl.run("apply", "--filename=-", given=objects)
    kubectl.wait("condition=Ready", "pod/first")
    shown = until(lambda: kubectl.run("logs", "first"))
    assert re.search(r"^/dev/\S+ .* /data$", shown, re.MULTILINE), shown
    of_node = kubectl.names("pod", *OF_CRUST)
    seen = installed.follow(look, POD=of_node[0])
    assert of_node[0].removeprefix("pod/") in seen
    assert re.search(r"default/first\s.*\bmounted\b", seen), seen
    assert installed.node.mounts_of_volumes() == ["tmpfs"]  # the guard alone
    kubectl.run("delete", "--filename=-", given=objects)
    until(lambda: not kubectl.names("pv"))
