"""The one user of a process that has a key of its own, by its settings: for every volume.

It has the interface of `volume_users.VolumeUsers`, which a node without its own key has. Secrets of calls are not
looked at: they are the guest's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crust.blockdriver.engines.rbd.place import Place
from crust.core import volumes


@dataclass(frozen=True, slots=True)
class OwnUser:
    """The user of `shared`."""

    shared: Place

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """Nothing: the secrets are the guest's."""

    def place(self, volume_id: volumes.VolumeId) -> Place:
        """The same for each."""
        return self.shared

    def forget(self, volume_id: volumes.VolumeId) -> None:
        """Nothing."""
