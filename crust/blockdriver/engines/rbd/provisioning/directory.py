"""librbd's directory of image names and its trash, and what a killed removal or renaming has left in them.

librbd moves an image to the trash in steps: the image is noted in the trash as one that is moving, the object
`rbd_id.NAME` goes, then the name's entry in the directory, and then it is noted that the image has arrived.

Killed before the third one, it leaves a name that cannot be opened or made: creating answers EEXIST, opening ENOENT.
A creation makes the object before the entry, so an entry without the object is of nobody who is still to come.

Killed before the last one, it leaves an image that cannot be removed from the trash: EUCLEAN, for ever. One that has
lost its name can only be removed, so whoever finds it notes that it has arrived.

To rename an image librbd makes the object of the new name, changes the entry in the directory, and removes the object
of the old name. Killed in between, it leaves both objects, and renaming again answers EEXIST. The entry says how far
it came.
"""

import errno
import struct

from crust.blockdriver.engines.rbd.place import has_object
from crust.ceph import omap
from crust.ceph.binding import Ioctx
from crust.ceph.failures import ignoring

_DIRECTORY, _TRASH = "rbd_directory", "rbd_trash"
_ARRIVED, _MOVING = 0, 1


def forget_removed(ioctx: Ioctx, name: str) -> None:
    """Remove the entry of a name that has no image. One of an image, and one that was made meanwhile, stay."""
    with ignoring(errno.ENOENT, errno.ESTALE):
        # before the object is looked for: the entry of an image that is made meanwhile has another id
        image_id = omap.read_keys(ioctx, _DIRECTORY, (f"name_{name}",)).get(f"name_{name}")
        if image_id is None or has_object(ioctx, f"rbd_id.{name}"):
            return
        ioctx.execute(_DIRECTORY, "rbd", "dir_remove_image", _encoded(name.encode()) + image_id)


def note_arrived(ioctx: Ioctx, image_id: str, name: str) -> bool:
    """Note that the image is in the trash, unless it has its name still: then whoever deletes it goes on."""
    forget_removed(ioctx, name)
    key, here = f"name_{name}", _encoded(image_id.encode())
    with ignoring(errno.ENOENT):
        if omap.read_keys(ioctx, _DIRECTORY, (key,)).get(key) == here:
            return False
    with ignoring(errno.ENOENT, errno.ESTALE):  # it is noted, or removed, by now
        ioctx.execute(_TRASH, "rbd", "trash_state_set", here + bytes([_ARRIVED, _MOVING]))
    return True


def finish_renaming(ioctx: Ioctx, image_id: str, old: str, new: str) -> bool:
    """Finish or undo a renaming that was begun; whether the image has the new name. The caller has the lock."""
    if not has_object(ioctx, f"rbd_id.{new}"):
        return False
    entry = omap.read_keys(ioctx, _DIRECTORY, (f"name_{new}",)).get(f"name_{new}")
    is_renamed = entry == _encoded(image_id.encode())
    with ignoring(errno.ENOENT):
        ioctx.remove_object(f"rbd_id.{old if is_renamed else new}")
    return is_renamed


def _encoded(text: bytes) -> bytes:
    """As Ceph writes a string, and so as the entry's id is stored."""
    return struct.pack("<I", len(text)) + text
