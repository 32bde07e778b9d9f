"""Names of inline ephemeral volumes, which no CreateVolume can have.

The CO's id of such a volume is known only on its node. The driver keeps it as a volume like any other, under an id
that is derived from that name, and never lists it.
"""

from crust import volumes
from crust.blockdriver.records.pool import Pool

_PREFIX = "\0ephemeral\0"
"""CreateVolume refuses control characters in a name."""


def name_of(volume_id: str) -> str:
    """The driver's own name for the CO's `volume_id`."""
    return _PREFIX + volume_id


def id_of(pool: Pool, volume_id: str) -> volumes.VolumeId:
    """The driver's own id for the CO's `volume_id`."""
    return pool.ids.volume_id(name_of(volume_id))


def is_name(name: str) -> bool:
    """Whether a record's name is that of an ephemeral volume."""
    return name.startswith(_PREFIX)
