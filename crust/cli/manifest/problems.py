"""Problems of a configuration in its pods. It must satisfy: probes reach the metrics port, the kubelet learns of the
driver, the sidecars find the socket, and each path of the settings outlives the container.
"""

import os
from collections.abc import Iterator

from crust.blockdriver.settings import LOCAL_ENGINES, DriverSettings
from crust.cli.manifest.composition import Pod
from crust.node.settings import NodeSettings


def of_pod(pod: Pod, settings: NodeSettings | DriverSettings, *, own_image: bool) -> Iterator[str]:
    """The problems of the settings in the pod that would run them. `own_image`: the image is not crust's."""
    if settings.traces and not own_image:
        yield (
            "the image has no OpenTelemetry, and the pod no OTEL_EXPORTER_OTLP_ENDPOINT: leave traces out, or name an"
            " image that has both"
        )
    host = settings.metrics_address.rpartition(":")[0]
    if host not in ("0.0.0.0", "[::]"):
        yield 'the probes ask at the pod\'s address: set metrics_address = "0.0.0.0:9810"'
    if isinstance(settings, NodeSettings):
        yield from _of_node(pod, settings)
    else:
        yield from _of_controller(pod, settings)


def _of_node(pod: Pod, settings: NodeSettings) -> Iterator[str]:
    if not settings.proxy.plugins_registry:
        yield "the kubelet would not learn of the driver: set proxy.plugins_registry"
    yield from _of_one_node(settings)
    yield from _socket_problems(pod, settings)
    yield from _path_problems(pod, _node_paths(settings), ("hostPath",))


def _of_one_node(settings: NodeSettings) -> Iterator[str]:
    """All pods have the same settings; CRUST_NODE_NAME gives each the name of its node."""
    access = settings.proxy.kubernetes
    names = [
        *(("driver.node_id", driver.node_id) for driver in settings.driver),
        ("proxy.kubernetes.node_name", access and access.node_name),
    ]
    for setting, name in names:
        if name and name != settings.node_name:
            yield f"every pod would be the node {name}: leave {setting} out"


def _of_controller(pod: Pod, settings: DriverSettings) -> Iterator[str]:
    for socket in sorted(_called(pod) - {settings.socket}):
        yield f'the sidecars call {socket}: set socket = "{socket}"'
    paths = iter((settings.run_dir, *_secret_paths(settings)))
    yield from _path_problems(pod, paths, ("secret", "emptyDir"))


def _called(pod: Pod) -> set[str]:
    """The sockets that the sidecars call."""
    flag = "--csi-address="
    return {
        argument.removeprefix(flag)
        for arguments in pod.arguments.values()
        for argument in arguments
        if argument.startswith(flag)
    }


def _path_problems(pod: Pod, paths: Iterator[str], kinds: tuple[str, ...]) -> Iterator[str]:
    outside = {
        name for name, volume in pod.volumes.items() if any(kind in volume for kind in kinds)
    }
    mounted = [path for path, mount in pod.mounts.items() if mount["name"] in outside]
    for path in sorted(set(paths)):
        if not any(f"{path}/".startswith(f"{parent}/") for parent in mounted):
            yield f"{path} would be the container's own: choose a path below {', '.join(mounted)}"


def _socket_problems(pod: Pod, settings: NodeSettings) -> Iterator[str]:
    """The sidecars of our driver mount the directory of its socket."""
    if "csi" not in pod.volumes:
        return
    directory = pod.volumes["csi"]["hostPath"]["path"]
    own_names = {driver.driver_name for driver in settings.driver if driver.engine in LOCAL_ENGINES}
    for served in settings.proxy.drivers:
        if served.name in own_names and os.path.dirname(served.socket) != directory:
            yield f"the sidecars look for the socket of {served.name} in {directory}"


def _node_paths(settings: NodeSettings) -> Iterator[str]:
    proxy = settings.proxy
    yield from (proxy.run_dir, proxy.volumes_root, *proxy.target_roots)
    yield from (path for driver in proxy.drivers for path in (driver.socket, driver.backend))
    yield from (shim.driver_socket for shim in settings.shim)
    if proxy.kubernetes and proxy.kubernetes.kubeconfig:
        yield proxy.kubernetes.kubeconfig
    for driver in settings.driver:
        yield driver.run_dir
        if driver.engine in LOCAL_ENGINES:
            yield driver.state_dir
            yield from filter(None, (driver.pool_id_file,))


def _secret_paths(driver: DriverSettings) -> Iterator[str]:
    """The paths of files in a Secret."""
    if driver.rbd is not None:
        yield driver.rbd.key_file
