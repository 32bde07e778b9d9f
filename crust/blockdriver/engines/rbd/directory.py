"""librbd's directory of image names, and an entry that a killed removal has left there.

librbd moves an image to the trash in steps: the image is noted in the trash, the object `rbd_id.NAME` goes, and then
the name's entry in the directory. Killed before the last one, it leaves a name that cannot be opened or made:
creating answers EEXIST, opening ENOENT. A creation makes the object before the entry, so an entry without the object
is of nobody who is still to come.
"""

import errno
import struct

from crust.blockdriver.engines.rbd import omap
from crust.blockdriver.engines.rbd.place import has_object, ignoring
from crust.ceph.binding import Ioctx

_DIRECTORY = "rbd_directory"


def forget_removed(ioctx: Ioctx, name: str) -> None:
    """Remove the entry of a name that has no image. One of an image, and one that was made meanwhile, stay."""
    with ignoring(errno.ENOENT, errno.ESTALE):
        # before the object is looked for: the entry of an image that is made meanwhile has another id
        image_id = omap.read_keys(ioctx, _DIRECTORY, (f"name_{name}",)).get(f"name_{name}")
        if image_id is None or has_object(ioctx, f"rbd_id.{name}"):
            return
        ioctx.execute(_DIRECTORY, "rbd", "dir_remove_image", _encoded(name.encode()) + image_id)


def _encoded(text: bytes) -> bytes:
    """As Ceph writes a string, and so as the entry's id is stored."""
    return struct.pack("<I", len(text)) + text
