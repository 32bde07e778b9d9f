"""A driver whose controller attaches, wrapped by crust as docs/wrapping.md says: examples/drivers/cloud.py.

The driver's process is on the node, and is controller and node at once. The sidecars are in a pod of the vendor's,
with the container of the page. Their rights lack the nodes: the chart gives crust's shim the right to ask for those.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from examples.drivers import cloud, disks
from tests.support import page_pods
from tests.support.kubernetes import cluster as clusters
from tests.support.kubernetes import images, microvm
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.daemons import Daemon

CLASS = "cloud-deferred"
_ACCOUNT = "cloud-controller"
_INNER = Path("/var/lib/kubelet/plugins", f"{cloud.NAME}-inner")
_READ = ["get", "list", "watch"]


@dataclass(frozen=True, slots=True)
class AttachingDriver:
    """Its files, and the log of its calls, are below `directory`."""

    directory: Path

    @contextmanager
    def wrapped(self, cluster: Cluster) -> Iterator[None]:
        """Driver, controller pod and crust's shims serve while the block runs; its volumes are gone by then."""
        for path in (self.directory, _INNER):
            path.mkdir()
        no_secret = json.dumps({"secrets": "not needed"})
        (self.directory / "switches.json").write_text(no_secret, encoding="utf-8")
        objects = [_CSI_DRIVER, *_account(), _controller()]
        try:
            with self._daemon().running():
                cluster.kubectl.apply(*objects)
                cluster.upgrade({**clusters.values(), "wrapped": [_WRAPPED]})
                cluster.kubectl.wait("condition=Available", f"deployment/{_ACCOUNT}")
                yield
                cluster.kubectl.delete(*objects)
                cluster.upgrade(clusters.values())
        finally:
            disks.detach_below(str(self.directory))

    def _daemon(self) -> Daemon:
        command = (
            *(sys.executable, "-m", cloud.__name__, f"--socket={_INNER}/csi.sock"),
            *(f"--state-dir={self.directory}", "--node-id=instance-1"),
        )
        environment = {"PYTHONPATH": str(images.CHECKOUT)}
        return Daemon(command, self.directory, notifies=False, environment=environment)

    def calls(self) -> list[str]:
        """The methods that were called, in their order, but those that only ask."""
        lines = (self.directory / "calls.jsonl").read_text(encoding="utf-8").splitlines()
        methods = [json.loads(line)["method"] for line in lines]
        return [each for each in methods if each.endswith("Volume")]


_CSI_DRIVER = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "CSIDriver",
    "metadata": {"name": cloud.NAME},
    "spec": {"attachRequired": True, "podInfoOnMount": True, "fsGroupPolicy": "File"},
}
_WRAPPED = {
    "name": cloud.NAME,
    "controller": {"namespace": "default", "serviceAccount": _ACCOUNT},
    "storageClasses": [
        {
            "name": CLASS,
            "defer": "always",
            "runtimeHandler": microvm.HANDLER,
            "allowVolumeExpansion": False,
        }
    ],
}


def _account() -> list[dict[str, Any]]:
    metadata = {"name": _ACCOUNT}
    rules = [
        _rule("", "persistentvolumes", [*_READ, "create", "patch", "delete"]),
        _rule("", "persistentvolumeclaims", [*_READ, "update"]),
        _rule("", "events", ["list", "watch", "create", "update", "patch"]),
        _rule("storage.k8s.io", "storageclasses", _READ),
        _rule("storage.k8s.io", "volumeattributesclasses", _READ),
        _rule("storage.k8s.io", "csinodes", _READ),
        _rule("storage.k8s.io", "volumeattachments", [*_READ, "patch"]),
        _rule("storage.k8s.io", "volumeattachments/status", ["patch"]),
    ]
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": _ACCOUNT, "namespace": "default"}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": metadata,
            "rules": rules,
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": _ACCOUNT},
            "subjects": [subject],
        },
    ]


def _rule(group: str, resource: str, verbs: list[str]) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": [resource], "verbs": verbs}


def _controller() -> dict[str, Any]:
    """The vendor's pod with crust's container. It stays while its node is not ready, as on a node of its own."""
    template = yaml.safe_load(page_pods.manifests()[-1])["spec"]["template"]
    (shim,) = template["spec"]["containers"]
    shim["image"] = f"crust-csi:{images.tag()}"
    template["metadata"] = {"labels": {"app": _ACCOUNT}}
    template["spec"]["containers"] += [
        {
            "name": Path(image.partition(":")[0]).name,
            "image": image,
            "args": ["--csi-address=/crust/csi.sock", "--retry-interval-max=5s"],
            "volumeMounts": [{"name": "crust-socket-dir", "mountPath": "/crust"}],
        }
        for image in (images.sidecars()["provisioner"], images.ATTACHER)
    ]
    driver_socket = {"name": "socket-dir", "hostPath": {"path": str(_INNER)}}
    template["spec"]["volumes"].append(driver_socket)
    template["spec"] |= {"serviceAccountName": _ACCOUNT, "tolerations": [{"operator": "Exists"}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": _ACCOUNT},
        "spec": {"selector": {"matchLabels": {"app": _ACCOUNT}}, "template": template},
    }
