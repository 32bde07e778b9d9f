"""What an image's header says, read by RBD's object class without opening the image.

To open an image librbd makes about a dozen calls, one after the other, and starts threads; a publish needs the size
and the mark. The methods are those by which every client of RBD, the kernel's too, opens an image of format 2.
"""

import errno
import struct
from dataclasses import dataclass

from crust.ceph.binding import Ioctx
from crust.ceph.failures import ignoring
from crust.core import errors

_NO_SNAPSHOT = struct.pack("<Q", 2**64 - 2)
_SIZE = struct.Struct("<BQ")
"""The exponent of the objects' size, and the size of the image in bytes."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Header:
    """The image's size in bytes, and one value of its metadata; "" if it has none."""

    size_bytes: int
    value: str


def read(ioctx: Ioctx, name: str, key: str) -> Header | None:
    """The header of the image of that name, with the metadata of that key; None if there is no image.

    Raises HeaderUnreadable, and the binding's own errors.
    """
    with ignoring(errno.ENOENT):
        try:
            image = f"rbd_header.{_text(_call(ioctx, f'rbd_id.{name}', 'get_id'))}"
            _, size_bytes = _SIZE.unpack(_call(ioctx, image, "get_size", _NO_SNAPSHOT))
            return Header(size_bytes, _metadata(ioctx, image, key))
        except (struct.error, UnicodeDecodeError) as err:
            raise errors.Corrupt.named(
                "HeaderUnreadable",
                f"the header of the image {name} cannot be read",
                why="the cluster answered it in an unknown form",
                hint="look at the image: rbd info; crust knows images of format 2",
            ) from err
    return None


def _metadata(ioctx: Ioctx, image: str, key: str) -> str:
    with ignoring(errno.ENOENT):
        return _text(_call(ioctx, image, "metadata_get", _LENGTH.pack(len(key)) + key.encode()))
    return ""


def _call(ioctx: Ioctx, name: str, method: str, data: bytes = b"") -> bytes:
    return ioctx.execute(name, "rbd", method, data)[1]


def _text(encoded: bytes) -> str:
    (length,) = _LENGTH.unpack_from(encoded)
    if length != len(encoded) - _LENGTH.size:
        raise struct.error("another length")
    return encoded[_LENGTH.size :].decode()
