"""The files of deploy/kubernetes for a configuration, with what its settings say; `kubectl apply -k` takes them.

A cluster has two kinds of settings: those of `crust node`, for the DaemonSet, and, where the controller is apart
from the nodes, those of its `crust driver`, for the Deployment. Each has its objects, and both know the driver's
name. What a pod needs is checked (`problems`), so that the objects are not accepted by the API server and then fail
in each pod.

For `kubectl apply` an object of the same kind, namespace and name is the same object: a second driver's DaemonSet
would replace the first one's, with no word. So each name begins with a stem that follows from the driver's name, and
no two drivers have one stem.
"""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from crust.cli.install import shipped
from crust.cli.manifest import composition, problems
from crust.cli.manifest.composition import Object
from crust.cli.programs import daemons
from crust.core.settings import OWN_DRIVER
from crust.core.settings.driver import LOCAL_ENGINES, DriverSettings
from crust.core.settings.loading import InvalidSettings
from crust.host.process import syscalls
from crust.node.settings import NodeSettings

_PROGRAM = "driver manifest"
_EXAMPLE_DRIVER = "csi.example.com"
EXAMPLE_SHARED = "rbd.csi.crust.dev"
"""The driver of the overlays for Ceph."""
_STEMS = {OWN_DRIVER: "crust", EXAMPLE_SHARED: "crust-rbd"}
"""The beginning of the names of a driver's objects, in the files of deploy/kubernetes."""
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_OF_ALL = ("Namespace", "CSIDriver")
"""Their names are not made from a stem: one is the cluster's, the other the driver's own."""
_RUN_DIRS = {OWN_DRIVER: "/run/crust", EXAMPLE_SHARED: "/run/crust-rbd"}
_KUBELET = "/var/lib/kubelet"
NAMESPACE = "crust-system"
_IMAGE = "crust-csi:"
_OF_NO_DRIVER = (NAMESPACE, _IMAGE)


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the cluster is to run: the settings of the nodes, or of the controller, and the choices of the command."""

    settings: NodeSettings | DriverSettings
    snapshots: bool = False
    resizer: bool = False
    image: str = ""
    namespace: str = ""


def composed(source: Path, wanted: Configuration) -> composition.Composition:
    """The files for kustomize, from the directory of deploy/kubernetes. Raises `InvalidSettings`."""
    first, *others = _of_each_driver(wanted)
    made = _composed(source, first)
    for further in others:
        other = _composed(source, further)
        made.resources |= {
            file: objects
            for file, objects in other.resources.items()
            if all(found["kind"] == "CSIDriver" for found in objects)
        }
        made.mount_more(other)
    found = list(problems.of(made.pod(), wanted.settings, own_image=bool(wanted.image)))
    if found:
        raise InvalidSettings(_PROGRAM, "; ".join(found))
    return made


def _of_each_driver(wanted: Configuration) -> list[Configuration]:
    """One configuration for each driver of a node's process. The first one's objects have the pods: of the driver
    whose pool is there, because only such a pod has the pool's directory.
    """
    settings = wanted.settings
    if isinstance(settings, DriverSettings) or len(settings.driver) < 2:
        return [wanted]
    drivers = sorted(settings.driver, key=lambda each: each.engine not in LOCAL_ENGINES)
    alone = [settings.model_copy(update={"driver": (driver,)}) for driver in drivers]
    first, *others = (replace(wanted, settings=each) for each in alone)
    return [first, *(replace(other, snapshots=False, resizer=False) for other in others)]


def _composed(source: Path, wanted: Configuration) -> composition.Composition:
    made = composition.composed([source / "overlays" / name for name in _overlays(wanted)])
    made.change(lambda found: _changed(found, wanted))
    if driver := _driver_of(wanted.settings):
        example = _example_of(driver)
        named = _named(example, driver.driver_name)
        made.config_map, made.renames = named(made.config_map), _mapped(made.renames, named)
    return made


def needs_pod_info(settings: NodeSettings) -> bool:
    """Whether publishes must name the pod, because its RuntimeClass may decide."""
    return settings.proxy.kubernetes is not None


def _overlays(wanted: Configuration) -> list[str]:
    """The directories."""
    settings = wanted.settings
    if isinstance(settings, DriverSettings):
        return ["ceph-controller"]
    return _node_overlays(wanted, _driver_of(settings))


def _node_overlays(wanted: Configuration, driver: DriverSettings | None) -> list[str]:
    with_sidecars = wanted.snapshots or wanted.resizer
    if driver is None:
        if with_sidecars:
            raise InvalidSettings(
                _PROGRAM, "the sidecars of a wrapped driver's controller are in its own manifests"
            )
        return ["wrapped-driver"]
    if driver.mode == "node":
        if with_sidecars:
            raise InvalidSettings(
                _PROGRAM,
                "driver.mode is 'node', and the sidecars are beside the controller: give its settings by --config",
            )
        return ["ceph-node"]
    if driver.engine not in LOCAL_ENGINES:
        raise InvalidSettings(
            _PROGRAM,
            "driver.mode is 'all', and each node would be a controller with the rights of one: set mode = \"node\","
            " and run a controller apart",
        )
    with_resizer = "distributed" if driver.node_deployment else "single-node"
    chosen = [("snapshots", wanted.snapshots), (with_resizer, wanted.resizer)]
    return [name for name, is_wanted in chosen if is_wanted] or ["block-driver"]


def _changed(found: Object, wanted: Configuration) -> Object:
    """An object, or a patch of one, for the settings."""
    settings = wanted.settings
    if driver := _driver_of(settings):
        found = _renamed(found, _example_of(driver), driver.driver_name)
    with_settings = partial(_with_settings, texts=_texts(wanted), image=wanted.image)
    found = _mapped(found, with_settings)
    if found["kind"] == "CSIDriver" and isinstance(settings, NodeSettings):
        found["spec"]["podInfoOnMount"] = needs_pod_info(settings)
    if found["kind"] in composition.WORKLOADS:
        _set_port(found, settings.metrics_address)
    return found


def _texts(wanted: Configuration) -> dict[str, str]:
    """What stands for the settings' own in the files: whole strings, and the elements of paths."""
    settings = wanted.settings
    texts = {NAMESPACE: wanted.namespace} if wanted.namespace else {}
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
    is_shared = driver is not None and driver.engine not in LOCAL_ENGINES
    return EXAMPLE_SHARED if is_shared else OWN_DRIVER


def _mapped(found: Any, change: Callable[[str], str]) -> Any:
    """The same, each of its texts changed, and no key."""
    if isinstance(found, dict):
        return {key: _mapped(value, change) for key, value in found.items()}
    if isinstance(found, list):
        return [_mapped(value, change) for value in found]
    return change(found) if isinstance(found, str) else found


def _with_settings(text: str, texts: dict[str, str], image: str) -> str:
    if image and text.startswith(_IMAGE):
        return image
    for before, after in texts.items():
        if text == before or text.startswith(f"{before}/"):
            text = after + text[len(before) :]
        elif text.endswith(f"/{before}"):
            text = text[: -len(before)] + after
    return text


def stem(driver: str) -> str:
    """The beginning of the names of a driver's objects. Raises `InvalidSettings`."""
    if not _SUBDOMAIN.fullmatch(driver):
        raise InvalidSettings(
            _PROGRAM,
            f"a CSIDriver object cannot have the name {driver}: driver_name must be lower-case letters, digits and"
            " '-', in parts that '.' separates",
        )
    # '-' is doubled, and stands neither first nor last in a part: so no two names become one
    found = _STEMS.get(driver) or f"crust-{driver.replace('-', '--').replace('.', '-')}"
    if driver not in _STEMS and found in _STEMS.values():
        raise InvalidSettings(
            _PROGRAM,
            f"the objects of driver_name {driver} would have the names of {EXAMPLE_SHARED}'s: give it a domain",
        )
    return found


def _renamed(found: Object, example: str, driver: str) -> Object:
    """An object that is written for the driver `example`, with the names of `driver`."""
    if found["kind"] in _OF_ALL:
        return found
    changed: Object = _mapped(found, _named(example, driver, _OF_NO_DRIVER))
    if found["metadata"]["name"] == _STEMS[example]:
        changed["metadata"]["name"] = stem(driver)
    return changed


def _named(example: str, driver: str, others: tuple[str, ...] = ()) -> Callable[[str], str]:
    """Makes the names of `driver` of those of `example`. What begins with one of `others` is no such name."""
    before, after = _STEMS[example], stem(driver)

    def named(text: str) -> str:
        is_name = text.startswith(f"{before}-") and not text.startswith(others)
        return after + text[len(before) :] if is_name else text

    return named


def _set_port(workload: Object, address: str) -> None:
    port = address.rpartition(":")[2]
    for container in workload["spec"]["template"]["spec"].get("containers", ()):
        if container["name"] == "crust" and "ports" in container and port.isdigit():
            container["ports"][0]["containerPort"] = int(port)


def write_manifest(config: Path | None, directory: Path, **choices: Any) -> None:
    """Write the directory. Raises `InvalidSettings`, and one of crust's errors for what the kernel refuses."""
    source = shipped() / "kubernetes"
    text = _settings_text(config, source)
    settings = _settings(text)
    wanted = Configuration(settings=settings, **choices)
    made = composed(source, wanted)
    name = "node.toml" if isinstance(settings, NodeSettings) else "controller.toml"
    with syscalls.translating(f"cannot write {directory}"):
        made.write(directory, wanted.namespace or NAMESPACE, (name, text))
    click.echo(f"kubectl apply -k {directory}")


def _settings(text: str) -> NodeSettings | DriverSettings:
    """Those of the controller if they say so, else those of the nodes. Without the environment of this process: the
    pods have their own.
    """
    found = daemons.load("driver" if _is_of_controller(text) else "node", text)
    assert isinstance(found, NodeSettings | DriverSettings)
    return found


def _is_of_controller(text: str) -> bool:
    try:
        return tomllib.loads(text).get("mode") == "controller"
    except tomllib.TOMLDecodeError:
        return False  # refused when it is loaded, with its line


def _settings_text(config: Path | None, source: Path) -> str:
    path = config or daemons.installed("node")
    if path is not None:
        return daemons.text("node", path)
    return (source / "overlays" / "block-driver" / "node.toml").read_text(encoding="utf-8")
