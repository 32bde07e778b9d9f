"""The commands that run a program, with its settings, logs and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

STOP_S = 140.0
"""How long a stop may take, until operations and calls have ended. The supervisor kills the process 10 s later."""

_STOP_OF_DRIVER_S = 890.0
"""The same for a program that runs mkfs and e2fsck."""


@dataclass(frozen=True, slots=True)
class Program:
    """A daemon, with the names of its settings' model and of its function, which are imported when it runs."""

    help: str
    model: str
    run: str
    stop_s: float = STOP_S


PROGRAMS: Mapping[str, Program] = {
    "node": Program(
        "Proxy, shim and driver in one process: the usual way on a node.",
        "crust.node.settings:NodeSettings",
        "crust.node.node_process:run",
        _STOP_OF_DRIVER_S,
    ),
    "proxy": Program(
        "Serve the CO's CSI sockets of this node.",
        "crust.proxy.settings:ProxySettings",
        "crust.proxy.proxy_process:run",
    ),
    "shim": Program(
        "Wrap one CSI driver.",
        "crust.csi_shim.settings:ShimSettings",
        "crust.csi_shim.shim_process:run",
    ),
    "driver": Program(
        "Serve block.csi.crust.dev, the block-volume CSI driver.",
        "crust.blockdriver.settings:DriverSettings",
        "crust.blockdriver.serve:run_driver",
        _STOP_OF_DRIVER_S,
    ),
    "kata": Program(
        "Let an unmodified Kata Containers use deferred volumes: an NRI plugin of the container engine.",
        "crust.kata.settings:KataSettings",
        "crust.kata.process:run",
    ),
}
"""The daemons by the name of the command, which is also the name of the settings file."""
