"""A kubelet whose first registration of a driver failed registers it later, and nobody restarts anything."""

import json
import sys
from pathlib import Path

from examples.drivers import minimal
from tests.support.kubernetes import cluster as clusters
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.control_plane import NODE
from tests.support.kubernetes.daemons import Daemon
from tests.support.kubernetes.images import CHECKOUT
from tests.support.kubernetes.kubectl import until

SOCKET = "/var/lib/kubelet/plugins/vendor/csi.sock"
REFUSES = {"NodeGetInfo": "fail UNAVAILABLE no node yet"}


def registered(cluster: Cluster) -> list[str]:
    """The drivers that the kubelet has registered."""
    return [each["name"] for each in cluster.kubectl.get("csinode", NODE)["spec"]["drivers"] or []]


def test_driver_that_was_refused_once_is_registered(cluster: Cluster, tmp_path: Path) -> None:
    switches = tmp_path / "switches.json"
    switches.write_text(json.dumps(REFUSES), encoding="utf-8")
    flags = (f"--socket={SOCKET}", f"--state-dir={tmp_path}", f"--node-id={NODE}")
    line = (sys.executable, "-m", minimal.__name__, *flags)
    shown = ("drivers", "--output=wide", f"--driver={minimal.NAME}")
    Path(SOCKET).parent.mkdir()
    vendor = Daemon(line, tmp_path, notifies=False, environment={"PYTHONPATH": str(CHECKOUT)})
    with vendor.running():
        wrapped = [{"name": minimal.NAME, "driverSocket": SOCKET}]
        cluster.upgrade({**clusters.values(), "wrapped": wrapped})
        until(lambda: "refused" in cluster.crust(*shown))
        assert registered(cluster) == ["block.csi.crust.dev"]
        switches.unlink()
        until(lambda: minimal.NAME in registered(cluster))
        cluster.upgrade(clusters.values())
    until(lambda: registered(cluster) == ["block.csi.crust.dev"])
