"""A cluster of one node, with crust as docs/kubernetes.md installs it, word by word; and objects for its tests."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support import chart
from tests.support.kubernetes import images, microvm
from tests.support.kubernetes.control_plane import NODE, ControlPlane
from tests.support.kubernetes.daemons import PATH
from tests.support.kubernetes.kubectl import Kubectl
from tests.support.kubernetes.node import Node
from tests.support.pages import page_blocks

DAEMONSET = "daemonset/crust-node"
OF_CRUST = ("--selector=app.kubernetes.io/name=crust-node", f"--namespace={chart.NAMESPACE}")
_CLASSES = [
    {"name": "crust-xfs", "defer": "never", "fsType": "xfs", "allowVolumeExpansion": True},
    {"name": "by-runtime-class", "defer": "runtime-class", "allowVolumeExpansion": True},
]
"""A mounted ext4 grows only for a process with CAP_SYS_RESOURCE, which a machine may not have; xfs grows."""
_SCRIPT = "trap 'exit 0' TERM; sleep infinity & wait"


@dataclass(frozen=True, slots=True)
class Cluster:
    """It ends with the namespaces of the test run."""

    kubectl: Kubectl
    node: Node
    plane: ControlPlane

    @classmethod
    @contextmanager
    def started(cls, directory: Path, group: str) -> Iterator["Cluster"]:
        """Steps 1 to 3 of the page are done when the block begins; crust's pods are gone before the node ends."""
        plane = ControlPlane(directory)
        with images.served(directory) as registry:
            node = Node(directory, group, registry)
            with node.directories(), plane.running(), node.running(plane):
                cluster = cls(plane.admin, node, plane)
                cluster.kubectl.wait("create", f"node/{NODE}")
                cluster.kubectl.wait("condition=Ready", f"node/{NODE}")
                cluster.kubectl.apply(_RUNTIME_CLASS)
                try:
                    for step in steps()[:3]:
                        cluster.follow(step)
                    yield cluster
                finally:
                    cluster.kubectl.run("label", "node", NODE, "crust.dev/enabled-")
                    cluster.kubectl.gone("pods", *OF_CRUST)

    def follow(self, step: str, build: images.Build | None = None, **names: str) -> str:
        """The output of a step of a page, run by a shell in the checkout of a build, or in this one.

        `names` are the words in the place of those of the page.
        """
        build = build or images.own()
        for word, value in {"<version>": build.tag, "NODE": NODE, **names}.items():
            step = step.replace(word, value)
        found = {"KUBECONFIG": str(self.kubectl.kubeconfig), "PATH": f"{chart.HELM.parent}:{PATH}"}
        done = subprocess.run(
            ["bash", "-euc", step], cwd=build.checkout, env={**os.environ, **found},
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{step}: {done.stdout}{done.stderr}"
        return done.stdout

    def upgrade(self, values: Mapping[str, Any]) -> None:
        """Other values of the chart; returns when the updated pod of crust serves."""
        done = subprocess.run(
            [chart.HELM, f"--kubeconfig={self.kubectl.kubeconfig}", "upgrade", "crust", chart.CHART,
             f"--namespace={chart.NAMESPACE}", f"--set=image.tag={images.tag()}", "--values=-"],
            input=json.dumps(values), text=True, check=False, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.rolled_out()

    def rolled_out(self) -> None:
        """Wait until the pod of crust is the newest one, and serves."""
        status = ("rollout", "status", DAEMONSET, f"--namespace={chart.NAMESPACE}")
        self.kubectl.run(*status, "--timeout=180s")

    def crust(self, *command: str) -> str:
        """The output of a command in the pod of crust on the node."""
        inside = ("exec", DAEMONSET, f"--namespace={chart.NAMESPACE}", "--container=crust", "--")
        return self.kubectl.run(*inside, "crust", *command)

    def inside(self, pod: str, script: str) -> str:
        """The output of a script where the volume of a pod is mounted: in its microVM, or in its first container."""
        is_guest = self.kubectl.get("pod", pod)["spec"].get("runtimeClassName") == microvm.HANDLER
        return self.in_guest(pod, script) if is_guest else self.kubectl.shell(pod, script)

    def in_guest(self, pod: str, script: str) -> str:
        """The output of a script in the microVM of a pod, with its volume at /data."""
        uid = self.kubectl.get("pod", pod)["metadata"]["uid"]
        (target,) = (each for each in self.node.targets_of_volumes() if uid in each)
        return microvm.output(target, script)

    def start(self, item: dict[str, Any]) -> None:
        """Make a pod, and wait until it is ready."""
        self.kubectl.apply(item)
        self.kubectl.wait("condition=Ready", f"pod/{item['metadata']['name']}")

    def remove(self, *claims: str) -> None:
        """Delete claims, and wait until their volumes are gone, also from the disk."""
        volumes = [self.kubectl.get("pvc", name)["spec"]["volumeName"] for name in claims]
        self.kubectl.run("delete", "pvc", *claims)
        self.kubectl.gone("pv", *volumes)


def values() -> dict[str, Any]:
    """Those of the chart for the tests: snapshots, and classes beside its own."""
    given = yaml.safe_load((chart.CHART / "values.yaml").read_text(encoding="utf-8"))
    classes = [*given["local"]["storageClasses"], *_CLASSES]
    return {"local": {"storageClasses": classes}, "snapshots": {"enabled": True}}


def steps() -> list[str]:
    """The five steps of docs/kubernetes.md, as the page has them."""
    return page_blocks.blocks("kubernetes.md")[:5]


_RUNTIME_CLASS = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": microvm.HANDLER},
    "handler": microvm.HANDLER,
}


def claim(name: str, storage_class: str, size: str = "320Mi", **spec: Any) -> dict[str, Any]:
    """A PersistentVolumeClaim of one pod."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "labels": {"claim": name}},
        "spec": {
            "accessModes": ["ReadWriteOncePod"],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": size}},
            **spec,
        },
    }


def pod(name: str, claim_name: str, script: str = _SCRIPT, **spec: Any) -> dict[str, Any]:
    """A pod that runs a script, and waits without one, with the volume of a claim at /data."""
    container = {
        "name": "shell",
        "image": images.SHELL,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", script],
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
            **spec,
        },
    }
