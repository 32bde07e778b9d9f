"""The directory that kustomize reads: the files of deploy/kubernetes that a configuration needs.

The directories there stay the only source of the objects, and kubectl renders them. The written directory has each
base once, with the patches of all chosen overlays, so kubectl applies all patches of a workload. `pod` gives the pod
to checks before it is rendered.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from crust.host.files import sparse

Object = dict[str, Any]
WORKLOADS = ("DaemonSet", "Deployment")


@dataclass(slots=True)
class Pod:
    """The pod of a workload and its patches: volumes by name, mounts of crust's container by path, arguments."""

    volumes: dict[str, Object] = field(default_factory=dict)
    mounts: dict[str, Object] = field(default_factory=dict)
    arguments: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Composition:
    """The content of the directory: objects by their file, patches in their order, and the ConfigMap's name."""

    resources: dict[str, list[Object]] = field(default_factory=dict)
    patches: list[Object] = field(default_factory=list)
    renames: list[Object] = field(default_factory=list)
    """Patches that rename all objects of one name: `target`, and the operations as `patch`."""

    config_map: str = ""
    _read: set[Path] = field(default_factory=set)

    def change(self, changed: Callable[[Object], Object]) -> None:
        """Replace each object, and each patch of an object, by the function's result."""
        self.resources = {
            file: [changed(item) for item in objects] for file, objects in self.resources.items()
        }
        self.patches = [changed(patch) for patch in self.patches]

    def pod(self) -> Pod:
        """The pod of its workload, as far as a check of the settings needs it."""
        pod = Pod()
        for part in (*self._workloads(), *self.patches):
            if part["kind"] in WORKLOADS:
                _merge(pod, part["spec"]["template"]["spec"])
        return pod

    def mount_more(self, other: "Composition") -> None:
        """Give the pod those volumes of the other pod whose names it does not have."""
        mine, theirs = self.pod(), other.pod()
        volumes = [volume for name, volume in theirs.volumes.items() if name not in mine.volumes]
        names = {volume["name"] for volume in volumes}
        mounts = [mount for mount in theirs.mounts.values() if mount["name"] in names]
        (workload,) = self._workloads()
        containers = [{"name": "crust", "volumeMounts": mounts}]
        identity = {key: workload[key] for key in ("apiVersion", "kind", "metadata")}
        pod = {"spec": {"containers": containers, "volumes": volumes}}
        self.patches.append({**identity, "spec": {"template": pod}})

    def write(self, directory: Path, namespace: str, settings: tuple[str, str]) -> None:
        """Write the directory, with a settings file (its name and text). Raises `OSError`."""
        directory.mkdir(parents=True, exist_ok=True)
        name, text = settings
        (directory / name).write_text(text, encoding="utf-8")
        for file, objects in self.resources.items():
            (directory / file).write_text(yaml.safe_dump_all(objects, sort_keys=False, width=120))
        patches = [{"patch": yaml.safe_dump(patch, sort_keys=False)} for patch in self.patches]
        renames = [{**rename, "patch": yaml.safe_dump(rename["patch"])} for rename in self.renames]
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": namespace,
            "resources": sorted(self.resources),
            "configMapGenerator": [{"name": self.config_map, "files": [name]}],
            "patches": [*patches, *renames],
        }
        (directory / "kustomization.yaml").write_text(
            yaml.safe_dump(kustomization, sort_keys=False)
        )

    def _workloads(self) -> list[Object]:
        return [
            item
            for objects in self.resources.values()
            for item in objects
            if item["kind"] in WORKLOADS
        ]

    def _add(self, directory: Path) -> None:
        if directory in self._read:
            return
        self._read.add(directory)
        (kustomization,) = _objects(directory / "kustomization.yaml")
        for name in kustomization.get("resources", ()):
            path = (directory / name).resolve()
            if sparse.exists(f"{path}/"):
                self._add(path)
            else:
                self.resources[f"{directory.name}-{path.name}"] = _objects(path)
        for generator in kustomization.get("configMapGenerator", ()):
            self.config_map = generator["name"]
        for patch in kustomization.get("patches", ()):
            if "path" in patch:
                self.patches += _objects(directory / patch["path"])
            else:
                self.renames.append({**patch, "patch": yaml.safe_load(patch["patch"])})


def composed(directories: Sequence[Path]) -> Composition:
    """The composition of all the directories."""
    composition = Composition()
    for directory in directories:
        composition._add(directory.resolve())
    return composition


def _objects(path: Path) -> list[Object]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def _merge(pod: Pod, spec: Object) -> None:
    """Add a pod's specification, or a patch of it, as kustomize merges lists of named objects."""
    _by_key(pod.volumes, spec.get("volumes", ()), "name")
    for container in spec.get("containers", ()):
        if container["name"] == "crust":
            _by_key(pod.mounts, container.get("volumeMounts", ()), "mountPath")
        if "args" in container:
            pod.arguments[container["name"]] = container["args"]


def _by_key(into: dict[str, Object], items: Iterable[Object], key: str) -> None:
    for item in items:
        if "$patch" in item:
            into.pop(item[key], None)
        else:
            into[item[key]] = item
