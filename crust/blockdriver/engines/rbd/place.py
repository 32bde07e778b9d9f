"""A namespace of a Ceph pool, and the connection to it: where the engine keeps images and records.

A call that ends with a timeout may still be carried out; each method of the engine looks before it acts.
"""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from crust.blockdriver.engines.protocol import ImageMissing
from crust.ceph import binding, failures
from crust.ceph.binding import Image, Ioctx
from crust.ceph.cluster_image import ClusterImage
from crust.ceph.connection import Connection
from crust.core.volumes import NetworkImage


@dataclass(frozen=True, slots=True)
class Place:
    """The namespace `namespace` of the pool `pool`; empty for the pool's default one."""

    client: Callable[[str], Connection]
    """The connection of a user, for what is done, as "cannot …"."""
    pool: str
    namespace: str
    is_lent: bool = False
    """Whether there may be no user: no key is here before a call brings one."""
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _turns: "WeakValueDictionary[str, threading.Lock]" = field(
        default_factory=WeakValueDictionary, repr=False, compare=False
    )

    @classmethod
    def of(cls, connection: Connection, pool: str, namespace: str) -> "Place":
        """The namespace as the one user of `connection` reaches it."""
        return cls(lambda _: connection, pool, namespace)

    @property
    def connection(self) -> Connection:
        """The connection; raises `CephKeyNotGiven` if no user is known."""
        return self.client(f"cannot reach {self.shown}")

    @property
    def shown(self) -> str:
        """Where it is, for people."""
        where = f"{self.pool}/{self.namespace}" if self.namespace else self.pool
        return f"the Ceph pool {where}"

    @property
    def images(self) -> binding.Images:
        """What librbd does to images by name."""
        return binding.load().images

    @contextmanager
    def ioctx(self, what: str) -> Iterator[Ioctx]:
        """The namespace, for calls inside the block; see `Connection.pool`."""
        with self.client(what).pool(self.pool, self.namespace, what) as ioctx:
            yield ioctx

    @contextmanager
    def volume(self, volume_id: str, what: str) -> Iterator[Ioctx]:
        """As `ioctx`, for calls that need the volume's image. Raises `ImageMissing`."""
        with self.ioctx(what) as ioctx:
            try:
                yield ioctx
            except binding.load().rbd.ImageNotFound as err:
                raise ImageMissing(volume_id) from err

    @contextmanager
    def image(self, ioctx: Ioctx, name: str, *, read_only: bool = True) -> Iterator[Image]:
        """An open image; one that is opened read-only registers no watch. Raises `rbd.ImageNotFound`."""
        image: Image = binding.load().rbd.Image(ioctx, name, read_only=read_only)
        with closing(image):
            yield image

    @contextmanager
    def turn(self, volume_id: str) -> Iterator[None]:
        """One thread at a time changes a volume's image and snapshots, by name. Operations of the volume and of each
        of its snapshots have different keys.
        """
        with self._guard:
            turn = self._turns.setdefault(volume_id, threading.Lock())
        with turn:
            yield

    def claimed(self, ioctx: Ioctx, name: str) -> ClusterImage:
        """The image of that name, for its claims."""
        return ClusterImage(self.connection, ioctx, name)

    def network_image(self, volume_id: str) -> NetworkImage:
        """The image of the volume, as a hypervisor is told of it."""
        who = self.connection.ceph_user
        cluster = self.connection.fsid()
        return NetworkImage(
            cluster, self.pool, self.namespace, volume_id, (who.monitors,), who.user
        )

    def has_image(self, ioctx: Ioctx, name: str) -> bool:
        """Whether there is an image of that name, complete or not, without opening it."""
        return has_object(ioctx, f"rbd_id.{name}")

    def names(self, ioctx: Ioctx) -> list[str]:
        """The names of all images."""
        return [str(each["name"]) for each in self.images.list2(ioctx)]


def has_object(ioctx: Ioctx, name: str) -> bool:
    """Whether an object exists."""
    with failures.ignoring(errno.ENOENT):
        ioctx.stat(name)
        return True
    return False
