"""The kubelet's directories, the pod that crust may be in, and a requirement of the cluster that no node can see.

Settings may not fit the pod that they are in: the chart writes both from the same values, others may not.
"""

from collections.abc import Iterator
from functools import partial

from crust.blockdriver.settings import LOCAL_ENGINES
from crust.cli.doctor.node import Finding, Node, doctor_check, error, ok, tried, warning
from crust.core.settings import OWN_DRIVER
from crust.host.mounts import mountinfo
from crust.node.settings import NodeSettings

_EMPTY_DIR = "/kubernetes.io~empty-dir/"
"""In the path of an emptyDir on the node."""


@doctor_check("kubelet-root")
def root(node: Node) -> Iterator[Finding]:
    """The directories in which a kubelet has pods, plugins and registrations."""
    for path in node.kubelet_roots():
        missing = [name for name in ("pods", "plugins") if not node.has(f"{path}/{name}/")]
        if not node.has(f"{path}/"):
            yield error(
                f"the kubelet's root {path} does not exist",
                "targets of volumes are below it",
                "set target_roots (and kubelet_root of a shim) to the kubelet's --root-dir",
            )
        elif missing:
            yield warning(
                f"{path} has no {' and no '.join(missing)}",
                "a kubelet makes them at its start",
                "start the kubelet, or correct target_roots",
            )
        elif not node.has_seals(node.at(path) / "pods"):
            yield warning(
                f"the filesystem of {path} has no immutable attribute (chattr +i)",
                "a pod with a bind mount of a directory above a target can write below its guard mount",
                "put the kubelet's root on ext4, xfs or btrfs, or let no pod of a microVM have a hostPath of it",
            )
        else:
            yield ok(f"the kubelet's root {path} has pods and plugins")


@doctor_check("kubelet-registry")
def registry(node: Node) -> Iterator[Finding]:
    """The directory in which the proxy registers its drivers, and what the kubelet has said to them."""
    settings = node.proxy_settings()
    if settings is None or not settings.plugins_registry:
        yield warning(
            "the proxy registers no driver with the kubelet",
            "plugins_registry is not set, or there are no settings of the proxy",
            "set plugins_registry, unless node-driver-registrar runs beside each driver",
        )
    elif not node.has(f"{settings.plugins_registry}/"):
        yield error(
            f"{settings.plugins_registry} does not exist",
            "the kubelet looks for drivers there, so it will not find them",
            "correct plugins_registry, or start the kubelet once",
        )
    else:
        served = node.answer.drivers if node.answer is not None else ()
        outside = [driver for driver in served if driver.registration in ("waiting", "refused")]
        for driver in outside:
            yield (error if driver.registration == "refused" else warning)(
                f"driver {driver.name} is not registered: {driver.registration}",
                "no pod of this node gets its volumes",
                "start the kubelet, if none runs; else crust drivers and the kubelet's log say why",
            )
        if not outside:
            yield ok(f"drivers are registered in {settings.plugins_registry}")


@doctor_check("mount-propagation")
def propagation(node: Node) -> Iterator[Finding]:
    """Mounts of this process would reach the host. A daemon checks it again at its own start."""
    if node.check_propagation is None:
        return
    for path in node.kubelet_roots():
        yield tried(partial(node.check_propagation, path), f"mounts below {path} reach the host")


@doctor_check("forced-detach")
def forced_detach(node: Node) -> Iterator[Finding]:
    """A switch of kube-controller-manager, for drivers whose controller attaches. No node can see it."""
    served = node.proxy_settings()
    names = {driver.name for driver in served.drivers} if served is not None else set()
    if served is not None and node.answer is not None:
        names |= {driver.name for driver in node.answer.drivers}
    attached = sorted(names - {OWN_DRIVER})
    if served is not None and not attached:
        yield ok(
            f"no controller detaches volumes of {OWN_DRIVER}, if its CSIDriver is as shipped: attachRequired: false"
        )
        return
    concerned = ", ".join(attached) or "drivers that a controller attaches"
    yield warning(
        f"whether the cluster detaches volumes by force cannot be seen from a node; it concerns {concerned}",
        "six minutes after a pod's deletion kube-controller-manager detaches its volume from a node that is not "
        "ready, even under a live guest",
        "check that it runs with --disable-force-detach-on-timeout=true: "
        "kubectl -n kube-system get pod -l component=kube-controller-manager -o yaml | grep force-detach; "
        "or run crust shim --controller beside its controller. With attachRequired: false no detach happens",
    )


@doctor_check("pod")
def fits_the_pod(node: Node) -> Iterator[Finding]:
    """The probes reach crust, each pod is another node, and the paths of the settings outlive the pod."""
    settings = node.settings_of("node")
    if not node.is_pod or not isinstance(settings, NodeSettings):
        yield ok("crust node does not run in a pod here")
        return
    yield from list(_misfits(node, settings)) or [ok("the settings fit the pod")]


def _misfits(node: Node, settings: NodeSettings) -> Iterator[Finding]:
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
