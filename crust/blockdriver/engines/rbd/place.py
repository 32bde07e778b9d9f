"""A namespace of a Ceph pool, and the connection to it: where the engine keeps images and records.

A call that ends with a timeout may still be carried out; each method of the engine looks before it acts.
"""

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Protocol
from weakref import WeakValueDictionary

from crust.ceph import binding, failures
from crust.ceph.binding import Image, Ioctx, Rados
from crust.ceph.cluster_image import ClusterImage
from crust.ceph.controller_lock import ControllerLock
from crust.ceph.user import CephUser


class Client(Protocol):
    """What the engine asks of its connection: `crust.ceph.connection.Connection`, or one by keys that calls bring."""

    is_lent: ClassVar[bool]
    """Whether there may be none: no key is here before a call brings one."""
    controller_lock: ControllerLock | None
    """Of a controller: the lock of its pool."""

    @property
    def who(self) -> CephUser:
        """As whom it connects."""
        ...

    def pool(self, pool: str, namespace: str, what: str) -> AbstractContextManager[Ioctx]:
        """A pool's namespace."""
        ...

    def check_namespace(self, pool: str, namespace: str) -> None:
        """Raise `CephNamespaceMissing`."""
        ...

    def command(self, prefix: str, **arguments: object) -> bytes:
        """A command to the monitors."""
        ...

    def cluster(self, what: str) -> AbstractContextManager[Rados]:
        """The cluster, for calls inside the block."""
        ...

    def endable(self) -> AbstractContextManager[Callable[[], str]]:
        """What ends all calls of the client that makes this thread's, while the block runs."""
        ...

    def fsid(self) -> str:
        """The cluster's id."""
        ...

    def address(self) -> str:
        """This client's own address in the cluster."""
        ...

    def blocklist(self, addresses: Iterable[str]) -> None:
        """Cut clients off, and wait for the map that says so."""
        ...

    def reopen(self) -> None:
        """Take calls again after a `close`."""
        ...

    def close(self) -> None:
        """Disconnect when the calls that run have ended."""
        ...


class _Turn:
    def __init__(self) -> None:
        self.lock = threading.Lock()


@dataclass(slots=True)
class _Turns:
    guard: threading.Lock = field(default_factory=threading.Lock)
    of: WeakValueDictionary[str, _Turn] = field(default_factory=WeakValueDictionary)


@dataclass(frozen=True, slots=True)
class Place:
    """The namespace `namespace` of the pool `pool`; empty for the pool's default one."""

    connection: Client
    pool: str
    namespace: str
    _turns: _Turns = field(default_factory=_Turns, repr=False, compare=False)

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
        with self.connection.pool(self.pool, self.namespace, what) as ioctx:
            yield ioctx

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
        with self._turns.guard:
            turn = self._turns.of.setdefault(volume_id, _Turn())
        with turn.lock:
            yield

    def claimed(self, ioctx: Ioctx, name: str) -> ClusterImage:
        """The image of that name, for its claims."""
        return ClusterImage(self.connection, ioctx, name)

    def has_image(self, ioctx: Ioctx, name: str) -> bool:
        """Whether there is an image of that name, complete or not, without opening it."""
        return has_object(ioctx, f"rbd_id.{name}")

    def names(self, ioctx: Ioctx) -> list[str]:
        """The names of all images."""
        return [str(each["name"]) for each in self.images.list2(ioctx)]


def has_object(ioctx: Ioctx, name: str) -> bool:
    """Whether an object exists."""
    try:
        ioctx.stat(name)
    except binding.load().failures as err:
        if failures.errno_of(err) == errno.ENOENT:
            return False
        raise
    return True


@contextmanager
def ignoring(*numbers: int) -> Iterator[None]:
    """Take failures with one of these errnos for success: what was to be done is done already."""
    try:
        yield
    except binding.load().failures as err:
        if failures.errno_of(err) not in numbers:
            raise
