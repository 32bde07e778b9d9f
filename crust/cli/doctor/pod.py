"""Whether the settings fit the pod that they are in. The chart writes both from the same values; others may not."""

from collections.abc import Iterator

from crust.blockdriver.settings import LOCAL_ENGINES
from crust.cli.doctor.finding import Finding, error, ok
from crust.cli.doctor.node import Node, doctor_check
from crust.host.mounts import mountinfo
from crust.node.settings import NodeSettings

_EMPTY_DIR = "/kubernetes.io~empty-dir/"
"""In the path of an emptyDir on the node."""


@doctor_check("pod")
def fits_the_pod(node: Node) -> Iterator[Finding]:
    """The probes reach crust, each pod is another node, and the paths of the settings outlive the pod."""
    settings = node.settings_of("node")
    if not node.is_pod or not isinstance(settings, NodeSettings):
        yield ok("crust node does not run in a pod here")
        return
    problems = [*_of_values(settings), *_of_paths(node, settings)]
    yield from problems or [ok("the settings fit the pod")]


def _of_values(settings: NodeSettings) -> Iterator[Finding]:
    host = settings.metrics_address.rpartition(":")[0]
    if host not in ("0.0.0.0", "[::]"):
        yield error(
            f"metrics_address is {settings.metrics_address!r}",
            "the kubelet's probes ask at the pod's address",
            'set metrics_address = "0.0.0.0:9810", and let a NetworkPolicy say who else may ask',
        )
    # all pods have the same settings; CRUST_NODE_NAME gives each the name of its node
    access = settings.proxy.kubernetes
    named = [("driver.node_id", driver.node_id) for driver in settings.driver]
    if access is not None:
        named.append(("proxy.kubernetes.node_name", access.node_name))
    for setting, name in named:
        if name != settings.node_name:
            yield error(
                f"{setting} is {name}",
                "all pods have this file, so each would be that node",
                f"leave {setting} out, and set CRUST_NODE_NAME from spec.nodeName",
            )


def _of_paths(node: Node, settings: NodeSettings) -> Iterator[Finding]:
    mounts = mountinfo.parse(node.at("/proc/self/mountinfo").read_bytes())
    proxy = settings.proxy
    paths = {proxy.run_dir, proxy.volumes_root, *proxy.target_roots}
    paths |= {driver.socket for driver in proxy.drivers}
    paths |= {shim.driver_socket for shim in settings.shim}
    for driver in settings.driver:
        paths.add(driver.run_dir)
        for pool in driver.by_pool().values() if driver.engine in LOCAL_ENGINES else ():
            paths |= {pool.state_dir, pool.pool_id_file}
    for path in sorted(filter(None, paths)):
        above = [mount for mount in mounts if f"{path}/".startswith(f"{mount.target.rstrip('/')}/")]
        holding = max(above, key=lambda mount: len(mount.target))
        if holding.target == "/" or _EMPTY_DIR in holding.root:
            yield error(
                f"{path} is the pod's own",
                "what crust keeps there is gone with the pod",
                "mount a hostPath there, or name a path below one in the settings",
            )
