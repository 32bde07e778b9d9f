"""An image as one client of the cluster sees it: the clients that have it open, and the client with librbd's lock.

A client that opens an image for writing watches its header; the OSD forgets a watch 30 s after the last sign of life.
A client that writes has librbd's own lock. The client gives it back after the answers to all its requests, or another
client breaks it. So no write can arrive from a client that neither watches nor has the lock: it has closed the image,
or has never written. That holds only for images with the feature exclusive-lock.
"""

import errno
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from crust.blockdriver.ceph import connection, controller_lock
from crust.blockdriver.ceph.binding import CephFailed, Image, Ioctx, load
from crust.core import errors

_CLIENT = 8
"""CEPH_ENTITY_TYPE_CLIENT."""


@dataclass(frozen=True, slots=True)
class ClusterImage:
    """The image `name` in the namespace of `ioctx`, and the client that looks at it."""

    client: connection.Connection
    ioctx: Ioctx
    name: str

    def opened(self) -> Image:
        """The image, open for reading, which is no watch; the caller closes it. Raises `rbd.ImageNotFound`."""
        image: Image = load().rbd.Image(self.ioctx, self.name, read_only=True)
        return image

    def watchers(self) -> frozenset[str]:
        """The addresses of the clients that have the image open for writing; none if there is no image."""
        with suppress(load().rbd.ImageNotFound), self.opened() as image:
            return watchers(image)
        return frozenset()

    def strangers(self, known: frozenset[str] = frozenset()) -> frozenset[str]:
        """The watchers beside the known clients and the active controller. Raises `rbd.ImageNotFound`."""
        with self.opened() as image:
            return controller_lock.unknown_clients(self.ioctx, lambda: watchers(image) - known)

    def not_closed(self, addresses: frozenset[str]) -> frozenset[str]:
        """The clients whose writes may still arrive: they watch the image, or have librbd's lock."""
        with suppress(load().rbd.ImageNotFound), self.opened() as image:
            if not image.features() & load().rbd.RBD_FEATURE_EXCLUSIVE_LOCK:
                return addresses
            return addresses & (watchers(image) | lockers(image))
        return frozenset()

    def break_locks(self, addresses: frozenset[str]) -> None:
        """Break librbd's lock of blocklisted clients, and of no other.

        It calls the object class of locks: librbd's own call blocklists again, for an hour, and writes to the image.
        """
        with self.opened() as image:
            header, locks = f"rbd_header.{image.id()}", _lockers(image)
        for client, cookie, address in locks:
            if address in addresses:
                # cls_lock_break_op: the lock's name, its holder (a client, and its number), and the cookie
                holder = struct.pack("<Bq", _CLIENT, int(client.removeprefix("client.")))
                operands = encoded(encoded(b"rbd_lock") + holder + encoded(cookie.encode()))
                request = struct.pack("<BB", 1, 1) + operands
                with suppress(load().rados.ObjectNotFound):  # another process has broken it
                    self.ioctx.execute(header, "lock", "break_lock", request)


@contextmanager
def reached(
    client: connection.Connection, pool: str, namespace: str, name: str, error_text: str
) -> Iterator[ClusterImage]:
    """The image, for calls that begin and end inside the block; `error_text`, "cannot …", begins the error's text.

    Raises CephImageMissing, and the errors of `Connection.pool`.
    """
    try:
        with client.pool(pool, namespace, error_text) as ioctx:
            yield ClusterImage(client, ioctx, name)
    except CephFailed as err:
        if err.number == errno.ENOENT:
            where = f"{pool}/{namespace}" if namespace else pool
            raise errors.NotReady.named(
                "CephImageMissing",
                f"there is no image {name} in {where}",
                why="it was removed, or made elsewhere",
            ) from err
        raise


def encoded(text: bytes) -> bytes:
    """The text in Ceph's encoding of a string."""
    return struct.pack("<I", len(text)) + text


def watchers(image: Image) -> frozenset[str]:
    """The addresses of the clients that have the image open for writing."""
    return frozenset(str(watcher["addr"]) for watcher in image.watchers_list())


def lockers(image: Image) -> frozenset[str]:
    """The addresses of the clients that have librbd's own lock."""
    return frozenset(address for _, _, address in _lockers(image))


def _lockers(image: Image) -> list[tuple[str, str, str]]:
    answer = image.list_lockers()  # of a free lock it is an empty list
    return list(answer["lockers"]) if isinstance(answer, dict) else []
