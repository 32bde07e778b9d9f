"""The objects of a cluster that runs a configuration: the files of deploy/kubernetes, with what the settings say.

A cluster has two kinds of settings: those of `crust node`, for the DaemonSet, and, where the controller is apart
from the nodes, those of its `crust driver`, for the Deployment. Each has its objects, and both know the driver's
name. What a pod needs is checked (`problems`), so that the objects are not accepted by the API server and then fail
in each pod.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crust.cli.manifest import kustomization, names, problems
from crust.cli.manifest.kustomization import Object
from crust.node.settings import NodeSettings
from crust.settings.driver import LOCAL_ENGINES, OWN_DRIVER, DriverSettings
from crust.settings.loading import InvalidSettings

_PROGRAM = "driver manifest"
_EXAMPLE_DRIVER = "csi.example.com"
_RUN_DIRS = {OWN_DRIVER: "/run/crust", names.EXAMPLE_SHARED: "/run/crust-rbd"}
_KUBELET = "/var/lib/kubelet"
_NAMESPACE = "crust-system"
_IMAGE = "crust-csi:"
_OF_NO_DRIVER = (_NAMESPACE, _IMAGE)


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the cluster is to run. `text` is the settings file, `settings` what it says: of the nodes, or of the
    controller.
    """

    text: str
    settings: NodeSettings | DriverSettings
    snapshots: bool = False
    resizer: bool = False
    image: str = ""
    namespace: str = ""


def made(source: Path, wanted: Configuration) -> list[Object]:
    """The objects, from the directory of deploy/kubernetes. Raises `InvalidSettings`, `UnknownKustomization`."""
    first, *others = _of_each_driver(wanted)
    objects = _rendered(source, first)
    workload = _workload(objects)
    for each in others:
        further = _rendered(source, each)
        objects += [found for found in further if found["kind"] == "CSIDriver"]
        _mount_more(workload, _workload(further))
    found = list(problems.of(workload, wanted.settings, own_image=bool(wanted.image)))
    if found:
        raise InvalidSettings(_PROGRAM, "; ".join(found))
    return objects


def _of_each_driver(wanted: Configuration) -> list[Configuration]:
    """One configuration for each driver of a node's process. The first one's objects have the pods: of the driver
    whose pool is there, because only such a pod has the pool's directory.
    """
    settings = wanted.settings
    if isinstance(settings, DriverSettings) or len(settings.driver) < 2:
        return [wanted]
    drivers = sorted(settings.driver, key=lambda each: each.engine not in LOCAL_ENGINES)
    alone = [settings.model_copy(update={"driver": (each,)}) for each in drivers]
    first, *others = (replace(wanted, settings=each) for each in alone)
    return [first, *(replace(each, snapshots=False, resizer=False) for each in others)]


def _rendered(source: Path, wanted: Configuration) -> list[Object]:
    overlays, file = _overlays(wanted)
    objects = kustomization.render(
        [source / "overlays" / each for each in overlays], {file: wanted.text}
    )
    return [_changed(each, wanted) for each in objects]


def _workload(objects: list[Object]) -> Object:
    (found,) = (each for each in objects if each["kind"] in ("DaemonSet", "Deployment"))
    return found


def _mount_more(workload: Object, other: Object) -> None:
    """Give the pod the files of the host that the other one's has beside the same ones."""
    pod, its = (each["spec"]["template"]["spec"] for each in (workload, other))
    here = {each["name"] for each in pod["volumes"]}
    pod["volumes"] += [each for each in its["volumes"] if each["name"] not in here]
    mounts = problems.crust_of(other)["volumeMounts"]
    problems.crust_of(workload)["volumeMounts"] += [
        each for each in mounts if each["name"] not in here
    ]


def needs_pod_info(settings: NodeSettings) -> bool:
    """Whether publishes must name the pod, because its RuntimeClass may decide."""
    return settings.proxy.kubernetes is not None


def _overlays(wanted: Configuration) -> tuple[list[str], str]:
    """The directories, and the name of the settings file in them."""
    settings = wanted.settings
    if isinstance(settings, DriverSettings):
        return [f"{_kind(settings)}-controller"], "controller.toml"
    return _node_overlays(wanted, _driver_of(settings)), "node.toml"


def _node_overlays(wanted: Configuration, driver: DriverSettings | None) -> list[str]:
    with_sidecars = wanted.snapshots or wanted.resizer
    if driver is None:
        if with_sidecars:
            raise InvalidSettings(
                _PROGRAM, "the sidecars of a wrapped driver's controller are in its own manifests"
            )
        return ["wrapped-driver"]
    if driver.mode == "node":
        return [_of_node_part(driver, with_sidecars=with_sidecars)]
    if _kind(driver) == "ceph":
        raise InvalidSettings(
            _PROGRAM,
            "driver.mode is 'all', and each node would be a controller with the rights of one: set mode = \"node\","
            " and run a controller apart; see docs/multi-node.md",
        )
    with_resizer = "distributed" if driver.node_deployment else "single-node"
    chosen = [("snapshots", wanted.snapshots), (with_resizer, wanted.resizer)]
    return [name for name, is_wanted in chosen if is_wanted] or ["block-driver"]


def _of_node_part(driver: DriverSettings, *, with_sidecars: bool) -> str:
    if with_sidecars:
        raise InvalidSettings(
            _PROGRAM,
            "driver.mode is 'node', and the sidecars are beside the controller: give its settings by --config",
        )
    if _kind(driver) == "central" and driver.cluster is None:
        raise InvalidSettings(
            _PROGRAM, "driver.mode is 'node', and no controller reaches it: set driver.cluster"
        )
    return f"{_kind(driver)}-node"


def _kind(driver: DriverSettings) -> str:
    return "ceph" if driver.engine == "rbd" else "central"


def _changed(found: Object, wanted: Configuration) -> Object:
    found = copy.deepcopy(found)
    if driver := _driver_of(wanted.settings):
        found = names.renamed(found, _example_of(driver), driver.driver_name, _OF_NO_DRIVER)
    if found["kind"] == "ConfigMap":  # the settings stay as they are written
        found["metadata"]["namespace"] = wanted.namespace or _NAMESPACE
        return found
    settings = wanted.settings
    found = _replaced(found, _texts(wanted), wanted.image)
    if found["kind"] == "CSIDriver" and isinstance(settings, NodeSettings):
        found["spec"]["podInfoOnMount"] = needs_pod_info(settings)
    if found["kind"] in ("DaemonSet", "Deployment"):
        _set_port(found, settings.metrics_address)
    return found


def _texts(wanted: Configuration) -> dict[str, str]:
    """What stands for the settings' own in the files: whole strings, and the elements of paths."""
    settings = wanted.settings
    texts = {_NAMESPACE: wanted.namespace} if wanted.namespace else {}
    driver = _driver_of(settings)
    if isinstance(settings, NodeSettings):
        texts[_KUBELET] = settings.proxy.target_roots[0]
        texts[_RUN_DIRS[_example_of(driver)]] = settings.proxy.run_dir
        if driver is None and settings.proxy.drivers:
            texts[_EXAMPLE_DRIVER] = settings.proxy.drivers[0].name
    if driver is not None:
        texts[_example_of(driver)] = driver.driver_name
    return texts


def _driver_of(settings: NodeSettings | DriverSettings) -> DriverSettings | None:
    if isinstance(settings, DriverSettings):
        return settings
    return settings.driver[0] if settings.driver else None


def _example_of(driver: DriverSettings | None) -> str:
    """The name that the files have in the place of the driver's."""
    is_shared = driver is not None and _kind(driver) == "ceph"
    return names.EXAMPLE_SHARED if is_shared else OWN_DRIVER


def _replaced(found: Any, texts: dict[str, str], image: str) -> Any:
    if isinstance(found, dict):
        return {key: _replaced(value, texts, image) for key, value in found.items()}
    if isinstance(found, list):
        return [_replaced(each, texts, image) for each in found]
    if not isinstance(found, str):
        return found
    if image and found.startswith(_IMAGE):
        return image
    for before, after in texts.items():
        if found == before or found.startswith(f"{before}/"):
            found = after + found[len(before) :]
        elif found.endswith(f"/{before}"):
            found = found[: -len(before)] + after
    return found


def _set_port(workload: Object, address: str) -> None:
    port = address.rpartition(":")[2]
    if port.isdigit():
        problems.crust_of(workload)["ports"][0]["containerPort"] = int(port)
