"""A cluster of one node with crust's chart, as docs/kubernetes.md installs it: image, chart, label, claim and pod."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import chart
from tests.support.kubernetes import images
from tests.support.kubernetes.control_plane import NODE, ControlPlane
from tests.support.kubernetes.kubectl import Kubectl
from tests.support.kubernetes.node import Node

VALUES = {
    "sidecars": {"provisioner": {"image": images.PROVISIONER}, "resizer": {"enabled": False}},
    "local": {
        "storageClasses": [{"name": "crust-host", "defer": "never", "allowVolumeExpansion": False}]
    },
}
"""Without csi-resizer no class may allow expansion."""
_SCRIPT = "trap 'exit 0' TERM; sleep infinity & wait"


@dataclass(frozen=True, slots=True)
class Cluster:
    """It ends with the namespaces of the test run."""

    kubectl: Kubectl
    node: Node

    @classmethod
    @contextmanager
    def started(cls, directory: Path, group: str) -> Iterator["Cluster"]:
        """The pods of crust are ready when the block begins, and gone before the node ends."""
        node = Node(directory, images.SHELL, group)
        control_plane = ControlPlane(directory)
        loaded = ((images.own(), images.OWN), (images.make(directory), images.TESTS))
        with node.directories(), control_plane.running(), node.running(control_plane, *loaded):
            cluster = cls(control_plane.admin, node)
            cluster.kubectl.wait("create", f"node/{NODE}")
            cluster.kubectl.wait("condition=Ready", f"node/{NODE}")
            try:
                cluster._install()
                yield cluster
            finally:
                cluster.kubectl.run("label", "node", NODE, "crust.dev/enabled-")
                of_crust = "--selector=app.kubernetes.io/name=crust-node"
                cluster.kubectl.gone("pods", of_crust, f"--namespace={chart.NAMESPACE}")

    def _install(self) -> None:
        namespace = f"--namespace={chart.NAMESPACE}"
        self.kubectl.run("create", "namespace", chart.NAMESPACE)
        label = "pod-security.kubernetes.io/enforce=privileged"
        self.kubectl.run("label", "namespace", chart.NAMESPACE, label)
        done = subprocess.run(
            [chart.HELM, f"--kubeconfig={self.kubectl.kubeconfig}", "install", "crust", chart.CHART, namespace,
             "--set", f"image.tag={images.tag()}", "--values=-"],
            input=json.dumps(VALUES), text=True, check=False, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.kubectl.run("label", "node", NODE, "crust.dev/enabled=true")
        self.kubectl.wait("jsonpath={.status.numberAvailable}=1", "daemonset/crust-node", namespace)


def claim(name: str, storage_class: str, size: str = "320Mi") -> dict[str, Any]:
    """A PersistentVolumeClaim of one pod."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOncePod"],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": size}},
        },
    }


def pod(name: str, claim_name: str) -> dict[str, Any]:
    """A pod that waits, with the volume of a claim at /data."""
    container = {
        "name": "shell",
        "image": images.SHELL,
        "command": ["sh", "-c", _SCRIPT],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": claim_name}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "containers": [container],
            "volumes": [volume],
            "terminationGracePeriodSeconds": 5,
        },
    }
