"""The RPCs that a driver serves, by the parts in this process and the pool.

    mode all                 both parts, for the volumes of this node
    mode controller          the controller part alone: no device, no root, no Node service
    mode node                the node part alone: a caller of the socket gets no right of a controller
    node_deployment          each node's driver provisions for its own node, by sidecars with --node-deployment

external-resizer and external-attacher have no node deployment: they could call the driver of any node, which has not
the volume. So such a driver advertises and serves none of their RPCs, and NodeExpandVolume grows the image too: for a
driver without controller expansion, external-resizer only marks the new size (its "trivial" resizer).

A pool that every node reaches (`is_shared`) has no topology, and its volumes need no attach: a process that opens an
image claims it in the pool first (`crust.blockdriver.ceph.claims`).

Other RPCs are UNIMPLEMENTED with the reason (CSI, "Error Scheme": disabled in the current mode).
"""

from dataclasses import dataclass
from typing import Literal

from crust.core import errors
from crust.core.settings.program import CsiProfile

Mode = Literal["all", "controller", "node"]
NODE_ID_MAX_BYTES = 256
"""CSI NodeGetInfoResponse."""

_CONTROLLER_SERVICES = (
    "/csi.v1.Controller/",
    "/csi.v1.GroupController/",
    "/csi.v1.SnapshotMetadata/",
    "/crust.v1.Pool/",
)
_NODE_SERVICES = ("/csi.v1.Node/",)
_ATTACH_METHODS = (
    "/csi.v1.Controller/ControllerPublishVolume",
    "/csi.v1.Controller/ControllerUnpublishVolume",
    "/csi.v1.Controller/ControllerGetNodeInfo",
)
_ANY_NODE_METHODS = (
    *_ATTACH_METHODS,
    "/csi.v1.Controller/ControllerExpandVolume",
    "/csi.v1.Controller/ControllerModifyVolume",
)


@dataclass(frozen=True, slots=True)
class Role:
    """The mode of a driver, whether it is one of a node deployment, and the CSI version that it serves."""

    mode: Mode = "all"
    node_deployment: bool = False
    is_shared: bool = False
    csi_profile: CsiProfile = "1.12"

    @property
    def has_controller(self) -> bool:
        return self.mode != "node"

    @property
    def has_node(self) -> bool:
        return self.mode != "controller"

    @property
    def attaches(self) -> bool:
        """Whether a controller, in any process, publishes volumes to nodes."""
        return not (self.node_deployment or self.is_shared)

    def check_method(self, method: str) -> None:
        """Raise `NotServedInMode`, `NotInNodeDeployment` or `NoAttachNeeded` unless the method is served."""
        absent = {"all": (), "node": _CONTROLLER_SERVICES, "controller": _NODE_SERVICES}[self.mode]
        what = f"{method.rpartition('/')[2]} is not served here"
        if method.startswith(absent):
            other_mode = "controller" if self.mode == "node" else "node"
            raise errors.Unsupported.named(
                "NotServedInMode",
                what,
                why=f"this driver runs in mode {self.mode}",
                hint=f"call the driver that runs in mode {other_mode}, or start this one in mode all",
            )
        if self.node_deployment and method in _ANY_NODE_METHODS:
            raise errors.Unsupported.named(
                "NotInNodeDeployment",
                what,
                why=(
                    "each node has a driver for its own volumes (node_deployment), and this call "
                    "may reach any of them"
                ),
            )
        if self.is_shared and method in _ATTACH_METHODS:
            raise errors.Unsupported.named(
                "NoAttachNeeded",
                what,
                why="every node reaches the pool, and a volume is claimed in it when it is opened",
            )

    def require(self, profile: CsiProfile) -> None:
        """Raise `NotInCsiProfile` unless `profile` is served."""
        if self.csi_profile != profile:
            raise errors.Unsupported.named(
                "NotInCsiProfile",
                "this RPC is not served",
                why=f"it belongs to CSI {profile}, and the driver serves another version",
                hint=f"start the driver with csi_profile {profile}",
            )
