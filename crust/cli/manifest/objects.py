"""The files of deploy/kubernetes for a configuration, adapted to its settings, for `kubectl apply -k`.

A cluster has two kinds of settings: the settings of `crust node`, for the DaemonSet, and, if the controller is apart
from the nodes, the settings of its `crust driver`, for the Deployment. Each has its objects, and both know the
driver's name. The command checks the pod's needs (`problems`): the API server would accept objects that fail later.

For `kubectl apply` an object of the same kind, namespace and name is the same object: a second driver's DaemonSet
would silently replace the first one's. So each name begins with a stem that follows from the driver's name, and no
two drivers have the same stem.
"""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from crust.blockdriver.settings import LOCAL_ENGINES, DriverSettings
from crust.cli.install import shipped
from crust.cli.manifest import composition, problems
from crust.cli.manifest.composition import Object
from crust.cli.programs import daemons
from crust.core.settings import OWN_DRIVER
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
"""The kinds whose names have no stem: Namespace has the cluster's name, CSIDriver the driver's."""
_RUN_DIRS = {OWN_DRIVER: "/run/crust", EXAMPLE_SHARED: "/run/crust-rbd"}
_KUBELET = "/var/lib/kubelet"
NAMESPACE = "crust-system"
_IMAGE = "crust-csi:"
_LITERAL = re.compile("'([^']*)'")
"""A string in an expression of an admission policy (CEL)."""
_OF_NO_DRIVER = (NAMESPACE, _IMAGE)


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings of the nodes, or of the controller, and the choices of the command."""

    settings: NodeSettings | DriverSettings
    snapshots: bool = False
    resizer: bool = False
    image: str = ""
    namespace: str = ""


def composed(source: Path, configuration: Configuration) -> composition.Composition:
    """The files for kustomize, from the directory of deploy/kubernetes. Raises `InvalidSettings`."""
    first, *others = _of_each_driver(configuration)
    files = _composed(source, first)
    for further in others:
        further_files = _composed(source, further)
        files.resources |= {
            file: objects
            for file, objects in further_files.resources.items()
            if all(item["kind"] == "CSIDriver" for item in objects)
        }
        files.mount_more(further_files)
    reasons = list(
        problems.of_pod(files.pod(), configuration.settings, own_image=bool(configuration.image))
    )
    if reasons:
        raise InvalidSettings(_PROGRAM, "; ".join(reasons))
    return files


def _of_each_driver(configuration: Configuration) -> list[Configuration]:
    """One configuration for each driver of a node's process. The objects of the first have the pods: it is the driver
    with a local pool, if there is one, because only its pod has the pool's directory.
    """
    settings = configuration.settings
    if isinstance(settings, DriverSettings) or len(settings.driver) < 2:
        return [configuration]
    drivers = sorted(settings.driver, key=lambda driver: driver.engine not in LOCAL_ENGINES)
    alone = [settings.model_copy(update={"driver": (driver,)}) for driver in drivers]
    first, *others = (replace(configuration, settings=part) for part in alone)
    return [first, *(replace(other, snapshots=False, resizer=False) for other in others)]


def _composed(source: Path, configuration: Configuration) -> composition.Composition:
    files = composition.composed([source / "overlays" / name for name in _overlays(configuration)])
    files.change(lambda item: _changed(item, configuration))
    if driver := _driver_of(configuration.settings):
        example = _example_of(driver)
        rename = _named(example, driver.driver_name)
        files.config_map, files.renames = rename(files.config_map), _mapped(files.renames, rename)
    return files


def needs_pod_info(settings: NodeSettings) -> bool:
    """Whether publishes must name the pod, because its RuntimeClass may decide."""
    return settings.proxy.kubernetes is not None


def _overlays(configuration: Configuration) -> list[str]:
    """The overlays of the configuration."""
    settings = configuration.settings
    if isinstance(settings, DriverSettings):
        return ["ceph-controller"]
    return _node_overlays(configuration, _driver_of(settings))


def _node_overlays(configuration: Configuration, driver: DriverSettings | None) -> list[str]:
    with_sidecars = configuration.snapshots or configuration.resizer
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
    chosen = [("snapshots", configuration.snapshots), (with_resizer, configuration.resizer)]
    return [name for name, is_wanted in chosen if is_wanted] or ["block-driver"]


def _changed(item: Object, configuration: Configuration) -> Object:
    """An object, or a patch of one, for the settings."""
    settings = configuration.settings
    if driver := _driver_of(settings):
        item = _renamed(item, _example_of(driver), driver.driver_name)
    with_settings = partial(_with_settings, texts=_texts(configuration), image=configuration.image)
    item = _mapped(item, with_settings)
    if item["kind"] == "CSIDriver" and isinstance(settings, NodeSettings):
        item["spec"]["podInfoOnMount"] = needs_pod_info(settings)
    if item["kind"] in composition.WORKLOADS:
        _set_port(item, settings.metrics_address)
    return item


def _texts(configuration: Configuration) -> dict[str, str]:
    """The texts of the files to be replaced, with the settings' texts: whole strings, and elements of paths."""
    settings = configuration.settings
    texts = {NAMESPACE: configuration.namespace} if configuration.namespace else {}
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
    """The driver's name in the files."""
    is_shared = driver is not None and driver.engine not in LOCAL_ENGINES
    return EXAMPLE_SHARED if is_shared else OWN_DRIVER


def _mapped(content: Any, change: Callable[[str], str]) -> Any:
    """The content with each text, and each string of an expression, changed, but no key."""
    if isinstance(content, dict):
        return {key: _mapped(value, change) for key, value in content.items()}
    if isinstance(content, list):
        return [_mapped(value, change) for value in content]
    if not isinstance(content, str):
        return content
    return _LITERAL.sub(lambda literal: f"'{change(literal[1])}'", change(content))


def _with_settings(text: str, texts: dict[str, str], image: str) -> str:
    if image and text.startswith(_IMAGE):
        return image
    for old, new in texts.items():
        if text == old or text.startswith(f"{old}/"):
            text = new + text[len(old) :]
        elif text.endswith(f"/{old}"):
            text = text[: -len(old)] + new
    return text


def stem(driver: str) -> str:
    """The beginning of the names of a driver's objects. Raises `InvalidSettings`."""
    if not _SUBDOMAIN.fullmatch(driver):
        raise InvalidSettings(
            _PROGRAM,
            f"a CSIDriver object cannot have the name {driver}: driver_name must be lower-case letters, digits and"
            " '-', in parts that '.' separates",
        )
    # '-' is doubled, and is neither first nor last in a part: so each stem has one name
    prefix = _STEMS.get(driver) or f"crust-{driver.replace('-', '--').replace('.', '-')}"
    if driver not in _STEMS and prefix in _STEMS.values():
        raise InvalidSettings(
            _PROGRAM,
            f"the objects of driver_name {driver} would have the names of {EXAMPLE_SHARED}'s: give it a domain",
        )
    return prefix


def _renamed(item: Object, example: str, driver: str) -> Object:
    """An object of the driver `example`, with the names of `driver`."""
    if item["kind"] in _OF_ALL:
        return item
    changed: Object = _mapped(item, _named(example, driver, _OF_NO_DRIVER))
    if item["metadata"]["name"] == _STEMS[example]:
        changed["metadata"]["name"] = stem(driver)
    return changed


def _named(example: str, driver: str, excluded: tuple[str, ...] = ()) -> Callable[[str], str]:
    """Turns names of `example` into names of `driver`, but no text that begins with one of `excluded`."""
    old, new = _STEMS[example], stem(driver)

    def named(text: str) -> str:
        is_name = text.startswith(f"{old}-") and not text.startswith(excluded)
        return new + text[len(old) :] if is_name else text

    return named


def _set_port(workload: Object, address: str) -> None:
    port = address.rpartition(":")[2]
    for container in workload["spec"]["template"]["spec"].get("containers", ()):
        if container["name"] == "crust" and "ports" in container and port.isdigit():
            container["ports"][0]["containerPort"] = int(port)


def write_manifest(config: Path | None, directory: Path, **choices: Any) -> None:
    """Write the directory. Raises `InvalidSettings`, and the kernel's refusals as errors of crust."""
    source = shipped() / "kubernetes"
    text = _settings_text(config, source)
    settings = _settings(text)
    configuration = Configuration(settings=settings, **choices)
    files = composed(source, configuration)
    name = "node.toml" if isinstance(settings, NodeSettings) else "controller.toml"
    with syscalls.translating(f"cannot write {directory}"):
        files.write(directory, configuration.namespace or NAMESPACE, (name, text))
    click.echo(f"kubectl apply -k {directory}")


def _settings(text: str) -> NodeSettings | DriverSettings:
    """The settings of the controller if their mode is controller, else of the nodes. The environment of this process
    is ignored: the pods have their own.
    """
    settings = daemons.load("driver" if _is_of_controller(text) else "node", text)
    assert isinstance(settings, NodeSettings | DriverSettings)
    return settings


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
