"""The kubelet's directories, and a requirement of the cluster that no node can see."""

from collections.abc import Iterator
from functools import partial

from crust.cli.doctor.finding import Finding, error, ok, tried, warning
from crust.cli.doctor.node import Node, doctor_check
from crust.core.settings import OWN_DRIVER


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
    """The directory in which the proxy registers its drivers."""
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
