"""The identity of this node and driver for the CO, and the CSI version that they serve."""

from dataclasses import dataclass
from typing import Literal

from crust import errors, volumes
from crust.blockdriver.controller import topology
from crust.blockdriver.services.roles import Role

CsiProfile = Literal["1.12", "1.13"]
NODE_ID_MAX_BYTES = 256
"""CSI NodeGetInfoResponse."""


class NotInCsiProfile(errors.Unsupported):
    """An RPC of another CSI version than the one that is served."""

    def __init__(self, profile: str) -> None:
        super().__init__(
            "this RPC is not served",
            why=f"it belongs to CSI {profile}, and the driver serves another version",
            hint=f"start the driver with csi_profile {profile}",
        )


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """The identity of this node and driver."""

    driver: volumes.DriverName
    node_id: str
    csi_profile: CsiProfile
    role: Role = Role()  # noqa: RUF009 - frozen

    @property
    def tells_condition(self) -> bool:
        """Whether health is reported in the form of CSI 1.12."""
        return self.csi_profile == "1.12"

    @property
    def segment(self) -> str:
        """The value of this node's topology segment; empty where every node reaches the pool."""
        if self.role.is_shared:
            return ""
        return topology.value_of(self.node_id)

    def require(self, profile: CsiProfile) -> None:
        """Raise `NotInCsiProfile` unless `profile` is served."""
        if self.csi_profile != profile:
            raise NotInCsiProfile(profile)
