"""Containers of a pod that helm has rendered, as a kubelet has containerd start them, with a node's paths elsewhere.

A hostPath is the directory that stands for the node's, else this machine's own (`/dev`). A ConfigMap is a directory
of its files, an emptyDir or a Secret one that is given. No API server is there. User, rights, namespaces and
environment are those of the manifest, which has no limits of resources. What it requests of them is a weight beside
other pods, and there are none. The seccomp profile `RuntimeDefault` is inside of containerd, whose client gives it
only to a container whose specification it makes itself. No kubelet is there that acts on probes: their answers are
those of tests/integration/containers/test_image.py.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import chart
from tests.support.containers import (
    BIDIRECTIONAL,
    HOST_TO_CONTAINER,
    Bind,
    Container,
    Containerd,
    Rights,
    all_capabilities,
)

_PROPAGATION = {
    "Bidirectional": BIDIRECTIONAL,
    "HostToContainer": HOST_TO_CONTAINER,
    "None": "rprivate",
}
_KUBELET_VARIABLES = ("KUBERNETES_SERVICE_HOST=192.0.2.1", "KUBERNETES_SERVICE_PORT=443")
"""What a kubelet adds to the environment of every container."""
_FIELDS = {"spec.nodeName": "node-1", "metadata.namespace": "crust", "metadata.name": "crust-pod"}
"""What an API server would say of the pod."""


@dataclass(frozen=True, slots=True)
class RenderedPod:
    """A pod of a DaemonSet or Deployment. `node`: directories that stand for paths of the node, or for volumes."""

    values: str
    workload: str
    node: Mapping[str, Path]
    directory: Path
    """Where the ConfigMaps' files are written."""
    host_network: bool = False
    """For a cluster of the tests, whose addresses are of the loopback interface."""

    @property
    def spec(self) -> Any:
        items = chart.of_kind(chart.objects(self.values), "DaemonSet", "Deployment")
        (found,) = (item for item in items if item["metadata"]["name"] == self.workload)
        return found["spec"]["template"]["spec"]

    def start(
        self, containerd: Containerd, image: Path | None = None, name: str = "crust"
    ) -> Container:
        """Start a container; it may not serve yet when this returns."""
        (container,) = (item for item in self.spec["containers"] if item["name"] == name)
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        binds = [
            bind
            for mount in container["volumeMounts"]
            if (bind := self._bind(mount, volumes[mount["name"]])) is not None
        ]
        return containerd.run(
            self.workload, container["args"], binds, image, self._rights(container)
        )

    def _rights(self, container: Any) -> Rights:
        assert "limits" not in container.get("resources", {})
        context = container["securityContext"]
        privileged = context.get("privileged", False)
        # the only two forms of the chart: another one would get the default list of the container engine
        assert privileged or context["capabilities"] == {"drop": ["ALL"]}
        return Rights(
            all_capabilities() if privileged else (),
            user=self._user,
            host_pid=self.spec.get("hostPID", False),
            host_network=self.host_network,
            may_escalate=context.get("allowPrivilegeEscalation", True),
            has_devices=privileged,
            readonly_root=context["readOnlyRootFilesystem"],
            variables=(*_KUBELET_VARIABLES, *map(_variable, container.get("env", ()))),
        )

    @property
    def _user(self) -> int:
        user = self.spec.get("securityContext", {}).get("runAsUser", 0)
        assert isinstance(user, int)
        return user

    def _bind(self, mount: Any, volume: Any) -> Bind | None:
        at = mount["mountPath"]
        propagation = _PROPAGATION[mount.get("mountPropagation", "None")]
        if at == "/tmp":  # every container has one
            return None
        readonly = mount.get("readOnly", False)
        if "configMap" in volume:
            return Bind(self._config_map(volume["configMap"]["name"]), at=at, readonly=readonly)
        path = volume["hostPath"]["path"] if "hostPath" in volume else volume["name"]
        return Bind(self.node.get(path, Path(path)), propagation, at, readonly)

    def _config_map(self, name: str) -> Path:
        config_map = chart.one(chart.objects(self.values), "ConfigMap", name)
        path = self.directory / name
        path.mkdir(exist_ok=True)
        for file, text in config_map["data"].items():
            (path / file).write_text(text, encoding="utf-8")
            os.chown(path / file, self._user, self._user)
        return path


def _variable(described: Any) -> str:
    """NAME=value, the value of the manifest or of a field of the pod."""
    if "value" in described:
        return f"{described['name']}={described['value']}"
    return f"{described['name']}={_FIELDS[described['valueFrom']['fieldRef']['fieldPath']]}"
