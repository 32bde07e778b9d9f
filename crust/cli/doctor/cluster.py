"""The store of a cluster with one controller, if the driver here is part of one."""

from collections.abc import Iterator

from crust import errors
from crust.cli.doctor.finding import Finding, check, error, of, ok
from crust.cli.doctor.node import Node


@check("etcd")
def etcd(node: Node) -> Iterator[Finding]:
    """Each member of the driver's etcd answers, keeps nodes apart, and accepts this node's certificate."""
    driver = next((each for each in node.driver_settings() if each.cluster is not None), None)
    if driver is None or driver.cluster is None:
        yield ok("crust's driver is in no cluster with one controller")
        return
    try:
        from crust.cli.doctor import etcd as store
    except ImportError as missing:
        todo = "pip install 'crust-csi[etcd]'"
        yield error("the driver's etcd cannot be asked", f"{missing.name} is not installed", todo)
        return
    try:
        yield from store.findings(driver.cluster, driver.node_id, is_node=driver.mode == "node")
    except errors.CrustError as problem:
        yield of(problem)
