"""A namespace of a Ceph pool with the engine's images and records, and the connection to it.

A call that ends with a timeout may still be carried out; each method of the engine looks before it acts.
"""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from crust.blockdriver.ceph.binding import Image, Ioctx, ignoring, load
from crust.blockdriver.ceph.cluster_image import ClusterImage
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.engines.protocol import ImageMissing
from crust.core.volumes import NetworkImage


@dataclass(frozen=True, slots=True)
class Namespace:
    """The RBD namespace `namespace` of the pool `pool`; empty for the pool's default namespace."""

    client: Callable[[str], Connection]
    """The connection of a user; its argument is for errors, as "cannot …"."""
    pool: str
    namespace: str
    is_lent: bool = False
    """Whether the user may be unknown: this node has no key before a call brings one."""
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _turns: "WeakValueDictionary[str, threading.Lock]" = field(
        default_factory=WeakValueDictionary, repr=False, compare=False
    )

    @classmethod
    def of(cls, connection: Connection, pool: str, namespace: str) -> "Namespace":
        """The namespace as the one user of `connection` reaches it."""
        return cls(lambda _: connection, pool, namespace)

    @property
    def connection(self) -> Connection:
        """The connection; raises `CephKeyNotGiven` if no user is known."""
        return self.client(f"cannot reach {self.shown}")

    @property
    def shown(self) -> str:
        where = f"{self.pool}/{self.namespace}" if self.namespace else self.pool
        return f"the Ceph pool {where}"

    @contextmanager
    def ioctx(self, error_text: str) -> Iterator[Ioctx]:
        """The namespace, for calls inside the block; see `Connection.pool`."""
        with self.client(error_text).pool(self.pool, self.namespace, error_text) as ioctx:
            yield ioctx

    @contextmanager
    def volume(self, volume_id: str, error_text: str) -> Iterator[Ioctx]:
        """As `ioctx`, for calls that need the volume's image. Raises `ImageMissing`."""
        with self.ioctx(error_text) as ioctx:
            try:
                yield ioctx
            except load().rbd.ImageNotFound as err:
                raise ImageMissing(volume_id) from err

    def image(
        self,
        ioctx: Ioctx,
        name: str | None = None,
        *,
        image_id: str | None = None,
        read_only: bool = True,
    ) -> Image:
        """An open image, by its name, or by its id also in the trash; a read-only client registers no watch. The
        caller closes it.

        Raises `rbd.ImageNotFound`.
        """
        opening = load().rbd.Image
        image: Image = opening(ioctx, name, image_id=image_id, read_only=read_only)
        return image

    @contextmanager
    def turn(self, volume_id: str) -> Iterator[None]:
        """Let one thread at a time change a volume's image and snapshots: their operations have different keys."""
        with self._guard:
            turn = self._turns.setdefault(volume_id, threading.Lock())
        with turn:
            yield

    def claimed(self, ioctx: Ioctx, name: str) -> ClusterImage:
        return ClusterImage(self.connection, ioctx, name)

    def network_image(self, volume_id: str) -> NetworkImage:
        user = self.connection.ceph_user
        cluster = self.connection.fsid()
        return NetworkImage(
            cluster, self.pool, self.namespace, volume_id, (user.monitors,), user.user
        )

    def has_image(self, ioctx: Ioctx, name: str) -> bool:
        """Whether there is an image of that name, complete or not, without opening it."""
        return has_object(ioctx, f"rbd_id.{name}")

    def names(self, ioctx: Ioctx) -> list[str]:
        return [str(image["name"]) for image in load().images.list2(ioctx)]


def has_object(ioctx: Ioctx, name: str) -> bool:
    with ignoring(errno.ENOENT):
        ioctx.stat(name)
        return True
    return False
