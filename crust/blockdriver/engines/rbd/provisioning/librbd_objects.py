"""librbd's own objects in RADOS: the header of an image, its object maps, the directory of names, the trash.

*Header.* To open an image librbd makes about a dozen calls, one after the other, and starts threads; a publish needs
the size and the mark. Every client of RBD, the kernel's too, opens an image of format 2 by these methods.

*Object maps.* An image and each of its snapshots has one, with two bits for each object: it is absent, or was written
since the snapshot before, or not. A client notes that before the first write to the object. When a snapshot is
removed, librbd adds its map to the next one. The kernel's client reads the same form.

*Directory and trash.* librbd moves an image to the trash in steps: the image is noted in the trash as moving, the
object `rbd_id.NAME` goes, then the name's entry in the directory, and then it is noted that the image has arrived.

Killed before the third step, it leaves a name that cannot be opened or made: a create answers EEXIST, an open ENOENT.
A create makes the object before the entry, so an entry without the object belongs to no running create.

Killed before the last step, it leaves an image that cannot be removed from the trash: EUCLEAN, for ever. An image
without its name can only be removed, so the next look notes that it has arrived.

To rename an image librbd makes the object of the new name, changes the entry in the directory, and removes the object
of the old name. Killed in between, it leaves both objects, and a second rename answers EEXIST. The entry says which
name the image has.
"""

import errno
import struct
from dataclasses import dataclass

from crust.blockdriver.ceph import omap
from crust.blockdriver.ceph.binding import Ioctx, ignoring
from crust.blockdriver.ceph.cluster_image import encoded
from crust.blockdriver.engines.rbd.namespace import has_object
from crust.core import errors

_DIRECTORY, _TRASH = "rbd_directory", "rbd_trash"
_ARRIVED, _MOVING = 0, 1
_NO_SNAPSHOT = struct.pack("<Q", 2**64 - 2)
_SIZE = struct.Struct("<BQ")
"""The exponent of the objects' size, and the size of the image in bytes."""
_LENGTH = struct.Struct("<I")
_SNAPSHOTS = struct.Struct("<QI")
"""The newest number that was given, and how many numbers follow."""
_LEAST_ANSWER = 8192
_MAP = struct.Struct("<IBBIQ")
"""Of an object map: the length of what follows, two versions, the length of the rest, and the number of objects."""


def read_header(ioctx: Ioctx, name: str, key: str) -> tuple[int, str] | None:
    """The size in bytes of the image of that name, and its metadata of that key, "" if it has none; None if there is
    no image.

    Raises HeaderUnreadable, and the binding's own errors.
    """
    with ignoring(errno.ENOENT):
        try:
            image = f"rbd_header.{_text(_call(ioctx, f'rbd_id.{name}', 'get_id'))}"
            _, size_bytes = _SIZE.unpack(_call(ioctx, image, "get_size", _NO_SNAPSHOT))
            value = ""
            with ignoring(errno.ENOENT):
                value = _text(_call(ioctx, image, "metadata_get", encoded(key.encode())))
            return size_bytes, value
        except (struct.error, UnicodeDecodeError) as err:
            raise _header_unreadable(name) from err
    return None


def has_snapshots(ioctx: Ioctx, image_id: str) -> bool:
    """Whether the image of that id has snapshots, also deleted ones that clones read; false without an image.

    Raises HeaderUnreadable, and the binding's own errors.
    """
    with ignoring(errno.ENOENT):
        try:
            answer = _call(ioctx, f"rbd_header.{image_id}", "get_snapcontext")
            _, count = _SNAPSHOTS.unpack_from(answer)
        except struct.error as err:
            raise _header_unreadable(image_id) from err
        return bool(count)
    return False


@dataclass(frozen=True, slots=True)
class ObjectMap:
    """The states of the objects of an image or a snapshot: absent (0), written since the snapshot before (1), being
    removed (2), or not written since (3); four in a byte, the first in the highest bits.
    """

    states: bytes

    def written(self) -> int:
        """How many objects exist that were written since the snapshot before."""
        states = int.from_bytes(self.states)
        lowest = int.from_bytes(b"\x55" * len(self.states))
        return ((states ^ states >> 1) & lowest).bit_count()

    def replaced_in(self, younger: "ObjectMap") -> int:
        """How many objects exist that the next snapshot, or the image after the last one, has not as they are."""
        own = self.states.ljust(len(younger.states), b"\0")
        old, new = int.from_bytes(own), int.from_bytes(younger.states)
        lowest = int.from_bytes(b"\x55" * len(own))
        return ((old | old >> 1) & ~(new & new >> 1) & lowest).bit_count()


def read_object_map(
    ioctx: Ioctx, image_id: str, snapshot: int | None, most_objects: int
) -> ObjectMap:
    """The object map of the image, or of a snapshot by its number. Raises HeaderUnreadable, the binding's errors."""
    name = f"rbd_object_map.{image_id}" + ("" if snapshot is None else f".{snapshot:016x}")
    answer = _call(ioctx, name, "object_map_load", length=most_objects // 3 + _LEAST_ANSWER)
    try:
        length, _, _, _, objects = _MAP.unpack_from(answer)
    except struct.error as err:
        raise _header_unreadable(image_id) from err
    states = answer[_LENGTH.size + length :][: -(-objects // 4)]
    if len(states) * 4 < objects:
        raise _header_unreadable(image_id)
    return ObjectMap(states)


def _header_unreadable(image: str) -> errors.Corrupt:
    return errors.Corrupt.named(
        "HeaderUnreadable",
        f"the header of the image {image} cannot be read",
        why="the cluster answered it in an unknown form",
    )


def _call(
    ioctx: Ioctx, name: str, method: str, data: bytes = b"", *, length: int = _LEAST_ANSWER
) -> bytes:
    return ioctx.execute(name, "rbd", method, data, length)[1]


def _text(answer: bytes) -> str:
    (length,) = _LENGTH.unpack_from(answer)
    if length != len(answer) - _LENGTH.size:
        raise struct.error("another length")
    return answer[_LENGTH.size :].decode()


def forget_removed(ioctx: Ioctx, name: str) -> None:
    """Remove the entry of a name without an image; the entry of an image, and an entry made meanwhile, stay."""
    with ignoring(errno.ENOENT, errno.ESTALE):
        # read before the object: the entry of an image that is made meanwhile has another id
        image_id = _entry(ioctx, name)
        if image_id is None or has_object(ioctx, f"rbd_id.{name}"):
            return
        ioctx.execute(_DIRECTORY, "rbd", "dir_remove_image", encoded(name.encode()) + image_id)


def note_arrived(ioctx: Ioctx, image_id: str, name: str) -> bool:
    """Note that the image is in the trash, unless it still has its name: then its deletion goes on."""
    forget_removed(ioctx, name)
    own_entry = encoded(image_id.encode())
    with ignoring(errno.ENOENT):
        if _entry(ioctx, name) == own_entry:
            return False
    with ignoring(errno.ENOENT, errno.ESTALE):  # it is noted, or removed, already
        ioctx.execute(_TRASH, "rbd", "trash_state_set", own_entry + bytes([_ARRIVED, _MOVING]))
    return True


def finish_renaming(ioctx: Ioctx, image_id: str, old: str, new: str) -> bool:
    """Finish or undo a rename that was begun; returns whether the image has the new name. The caller has the lock."""
    if not has_object(ioctx, f"rbd_id.{new}"):
        return False
    is_renamed = _entry(ioctx, new) == encoded(image_id.encode())
    with ignoring(errno.ENOENT):
        ioctx.remove_object(f"rbd_id.{old if is_renamed else new}")
    return is_renamed


def _entry(ioctx: Ioctx, name: str) -> bytes | None:
    """The encoded id of the image that has the name by the directory."""
    return omap.read_keys(ioctx, _DIRECTORY, (f"name_{name}",)).get(f"name_{name}")
