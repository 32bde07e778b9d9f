"""Who this node and driver are for the CO, and which version of CSI they speak."""

from dataclasses import dataclass
from typing import Literal

from crust import errors, volumes
from crust.blockdriver.controller import topology

CsiProfile = Literal["1.12", "1.13"]
NODE_ID_MAX_BYTES = 256
"""CSI NodeGetInfoResponse."""


class NotInCsiProfile(errors.Unsupported):
    """An RPC of another version of CSI than the one that is served."""

    def __init__(self, profile: str) -> None:
        super().__init__(
            "this call is not served",
            why=f"it belongs to CSI {profile}, and the driver serves another version",
            hint=f"start the driver with csi_profile {profile}",
        )


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Who this node and driver are for the CO."""

    driver: volumes.DriverName
    node_id: str
    csi_profile: CsiProfile

    @property
    def tells_condition(self) -> bool:
        """Whether health is told as CSI 1.12 does."""
        return self.csi_profile == "1.12"

    @property
    def segment(self) -> str:
        """The value of this node's topology segment."""
        return topology.value_of(self.node_id)

    def require(self, profile: CsiProfile) -> None:
        """Raise `NotInCsiProfile` unless `profile` is served."""
        if self.csi_profile != profile:
            raise NotInCsiProfile(profile)
