"""How an inline ephemeral volume is called: by a name that no CreateVolume can have.

The CO names such a volume by an id of its own, which is known on its node alone. The driver keeps it as a volume like
any other, under an id that follows from that name, and never lists it.
"""

from crust import volumes
from crust.blockdriver.records.pool import Pool

_PREFIX = "\0ephemeral\0"
"""CreateVolume refuses control characters in a name."""


def name_of(volume_id: str) -> str:
    """The driver's own name of the volume that the CO calls `volume_id`."""
    return _PREFIX + volume_id


def id_of(pool: Pool, volume_id: str) -> volumes.VolumeId:
    """The driver's own id of the volume that the CO calls `volume_id`."""
    return pool.ids.volume_id(name_of(volume_id))


def is_name(name: str) -> bool:
    """Whether a record's name is that of an ephemeral volume."""
    return name.startswith(_PREFIX)
