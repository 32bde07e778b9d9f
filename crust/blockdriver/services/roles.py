"""Which RPCs a driver serves: by the part of it that runs in this process, and by who provisions.

    mode all                 both parts, for the volumes of this node
    mode controller          the controller part alone: no device, no root, no Node service
    mode node                the node part alone: no right of a controller is served to who reaches the socket
    node_deployment          each node's driver provisions for its own node, by sidecars with --node-deployment

external-resizer and external-attacher have no node deployment: they could ask the driver of any node, which has not
the volume. So such a driver advertises and serves none of their RPCs, and NodeExpandVolume grows the image too: where
a driver has no controller expansion, external-resizer only marks the new size (its "trivial" resizer).

A pool that every node reaches (`is_shared`) has no topology, and its volumes need no attach: whoever opens an image
claims it in the pool first (`crust.ceph.claims`). A controller that published to nodes would know them all.

What is not served is UNIMPLEMENTED with the reason (CSI, "Error Scheme": disabled in the current mode).
"""

from dataclasses import dataclass
from typing import Literal

from crust import errors

Mode = Literal["all", "controller", "node"]

_OF_CONTROLLER = (
    "/csi.v1.Controller/",
    "/csi.v1.GroupController/",
    "/csi.v1.SnapshotMetadata/",
)
_OF_NODE = "/csi.v1.Node/"
_OF_OTHER_NODES = frozenset(
    f"/csi.v1.Controller/{name}"
    for name in (
        "ControllerPublishVolume",
        "ControllerUnpublishVolume",
        "ControllerExpandVolume",
        "ControllerModifyVolume",
        "ControllerGetNodeInfo",
    )
)

_OF_ATTACH = frozenset(
    f"/csi.v1.Controller/{name}"
    for name in (
        "ControllerPublishVolume",
        "ControllerUnpublishVolume",
        "ControllerGetNodeInfo",
    )
)


class NotServedInMode(errors.Unsupported):
    """An RPC of the part of the driver that does not run here."""

    def __init__(self, mode: Mode, method: str) -> None:
        other = "controller" if mode == "node" else "node"
        super().__init__(
            f"{method.rpartition('/')[2]} is not served here",
            why=f"this driver runs in mode {mode}",
            hint=f"call the driver that runs in mode {other}, or start this one in mode all",
        )


class NoAttachNeeded(errors.Unsupported):
    """An RPC for attaching, which the volumes of a pool that every node reaches do not need."""

    def __init__(self, method: str) -> None:
        super().__init__(
            f"{method.rpartition('/')[2]} is not served here",
            why="every node reaches the pool, and a volume is claimed in it when it is opened",
            hint="set attachRequired to false in the CSIDriver object",
        )


class NotInNodeDeployment(errors.Unsupported):
    """An RPC whose sidecar calls one driver for all nodes, and the driver of each node has its own volumes only."""

    def __init__(self, method: str) -> None:
        super().__init__(
            f"{method.rpartition('/')[2]} is not served here",
            why="each node has a driver for its own volumes (node_deployment), and this call may reach any of them",
            hint="volumes need no attach, grow in NodeExpandVolume, and keep the I/O limits of their creation",
        )


@dataclass(frozen=True, slots=True)
class Role:
    """The mode of a driver, and whether it is one of a node deployment."""

    mode: Mode = "all"
    node_deployment: bool = False
    is_shared: bool = False

    @property
    def has_controller(self) -> bool:
        """Whether the controller's services are served."""
        return self.mode != "node"

    @property
    def has_node(self) -> bool:
        """Whether the Node service is served."""
        return self.mode != "controller"

    @property
    def attaches(self) -> bool:
        """Whether a controller publishes volumes to nodes, wherever it runs."""
        return not (self.node_deployment or self.is_shared)

    def check(self, method: str) -> None:
        """Raise why a method, by its full name, is not served: `NotServedInMode`, `NotInNodeDeployment` or
        `NoAttachNeeded`.
        """
        if not self.has_controller and method.startswith(_OF_CONTROLLER):
            raise NotServedInMode(self.mode, method)
        if not self.has_node and method.startswith(_OF_NODE):
            raise NotServedInMode(self.mode, method)
        if self.node_deployment and method in _OF_OTHER_NODES:
            raise NotInNodeDeployment(method)
        if self.is_shared and method in _OF_ATTACH:
            raise NoAttachNeeded(method)
