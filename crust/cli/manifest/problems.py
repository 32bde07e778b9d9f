"""Why a configuration cannot work in its pods: probes reach the metrics port, the kubelet learns of the driver, the
sidecars find the socket, and each path of the settings outlives the container.
"""

import os
from collections.abc import Iterator
from typing import Any

from crust.cli.manifest.kustomization import Object
from crust.node.settings import NodeSettings
from crust.settings.driver import LOCAL_ENGINES, DriverSettings


def of(
    workload: Object, settings: NodeSettings | DriverSettings, *, own_image: bool
) -> Iterator[str]:
    """What is wrong with the settings, for the DaemonSet or Deployment that would run them. `own_image`: the image is
    another one than crust's.
    """
    if settings.traces and not own_image:
        yield (
            "the image has no OpenTelemetry, and the pod no OTEL_EXPORTER_OTLP_ENDPOINT: leave traces out, or name an"
            " image that has both"
        )
    host = settings.metrics_address.rpartition(":")[0]
    if host not in ("0.0.0.0", "[::]"):
        yield 'the probes ask at the pod\'s address: set metrics_address = "0.0.0.0:9810"'
    if isinstance(settings, NodeSettings):
        yield from _of_node(workload, settings)
    else:
        yield from _of_controller(workload, settings)


def crust_of(workload: Object) -> Object:
    """The container of crust."""
    containers = workload["spec"]["template"]["spec"]["containers"]
    found: Object = next(each for each in containers if each["name"] == "crust")
    return found


def _of_node(daemon_set: Object, settings: NodeSettings) -> Iterator[str]:
    if not settings.proxy.plugins_registry:
        yield "the kubelet would not learn of the driver: set proxy.plugins_registry"
    yield from _of_one_node(settings)
    yield from _socket_problems(daemon_set["spec"]["template"]["spec"], settings)
    yield from _path_problems(daemon_set, _node_paths(settings), ("hostPath",))


def _of_one_node(settings: NodeSettings) -> Iterator[str]:
    """All pods have the same settings, and each its node's name by CRUST_NODE_NAME."""
    access = settings.proxy.kubernetes
    given = [
        *(("driver.node_id", each.node_id) for each in settings.driver),
        ("proxy.kubernetes.node_name", access and access.node_name),
    ]
    for setting, name in given:
        if name and name != settings.node_name:
            yield f"every pod would be the node {name}: leave {setting} out"


def _of_controller(deployment: Object, settings: DriverSettings) -> Iterator[str]:
    for socket in sorted(_called(deployment) - {settings.socket}):
        yield f'the sidecars call {socket}: set socket = "{socket}"'
    paths = iter((settings.run_dir, *_secret_paths(settings)))
    yield from _path_problems(deployment, paths, ("secret", "emptyDir"))


def _called(workload: Object) -> set[str]:
    """The sockets that sidecars are given."""
    flag = "--csi-address="
    return {
        argument.removeprefix(flag)
        for container in workload["spec"]["template"]["spec"]["containers"]
        for argument in container.get("args", ())
        if argument.startswith(flag)
    }


def _path_problems(workload: Object, paths: Iterator[str], kinds: tuple[str, ...]) -> Iterator[str]:
    volumes = workload["spec"]["template"]["spec"]["volumes"]
    names = {each["name"] for each in volumes if any(kind in each for kind in kinds)}
    mounted = [
        each["mountPath"] for each in crust_of(workload)["volumeMounts"] if each["name"] in names
    ]
    for path in sorted(set(paths)):
        if not any(f"{path}/".startswith(f"{each}/") for each in mounted):
            yield f"{path} would be the container's own: choose a path below {', '.join(mounted)}"


def _socket_problems(pod: Any, settings: NodeSettings) -> Iterator[str]:
    """The sidecars of our driver have its socket's directory."""
    for volume in pod["volumes"]:
        if volume["name"] != "csi":
            continue
        directory = volume["hostPath"]["path"]
        own = {each.driver_name for each in settings.driver if each.engine in LOCAL_ENGINES}
        for each in settings.proxy.drivers:
            if each.name in own and os.path.dirname(each.socket) != directory:
                yield f"the sidecars look for the socket of {each.name} in {directory}"


def _node_paths(settings: NodeSettings) -> Iterator[str]:
    proxy = settings.proxy
    yield from (proxy.run_dir, proxy.volumes_root, *proxy.target_roots)
    yield from (path for each in proxy.drivers for path in (each.socket, each.backend))
    yield from (each.driver_socket for each in settings.shim)
    if proxy.kubernetes and proxy.kubernetes.kubeconfig:
        yield proxy.kubernetes.kubeconfig
    for driver in settings.driver:
        yield driver.run_dir
        if driver.engine in LOCAL_ENGINES:
            yield driver.state_dir
            yield from filter(None, (driver.pool_id_file,))
        yield from _certificates(driver)


def _certificates(driver: DriverSettings) -> Iterator[str]:
    if driver.cluster is not None:
        yield from (driver.cluster.ca, driver.cluster.cert, driver.cluster.key)


def _secret_paths(driver: DriverSettings) -> Iterator[str]:
    """What a Secret brings."""
    yield from _certificates(driver)
    if driver.rbd is not None:
        yield driver.rbd.key_file
