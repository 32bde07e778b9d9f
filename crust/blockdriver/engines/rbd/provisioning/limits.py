"""I/O limits as the configuration of an image: whoever opens it through librbd keeps to them, and changes at once.

librbd limits per client, and an image has one writer. A limit of 0 is none: the key is removed.
"""

from contextlib import suppress
from dataclasses import dataclass

from crust.blockdriver.engines.protocol import ImageMissing
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.provisioning import image_change
from crust.ceph import binding
from crust.core import volumes

_KEYS = {
    "rbd_qos_read_iops_limit": "read_iops",
    "rbd_qos_write_iops_limit": "write_iops",
    "rbd_qos_read_bps_limit": "read_bytes_per_second",
    "rbd_qos_write_bps_limit": "write_bytes_per_second",
}


@dataclass(frozen=True, slots=True)
class RbdLimits:
    """The limits of the images in `place`."""

    place: Place

    def set_limits(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """Set all four. Raises `ImageMissing`, `RbdClientSilent`."""
        with self.place.ioctx(f"cannot limit the I/O of {volume_id}") as ioctx:
            try:
                with image_change.changing(self.place, ioctx, volume_id) as image:
                    for key, name in _KEYS.items():
                        wanted = getattr(limits, name)
                        if wanted:
                            image.config_set(key, str(wanted))
                        else:
                            with suppress(KeyError):  # the binding's word for "there is none"
                                image.config_remove(key)
            except binding.load().rbd.ImageNotFound as err:
                raise ImageMissing(volume_id) from err
