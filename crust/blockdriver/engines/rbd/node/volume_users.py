"""The users of Ceph whose keys calls bring to a node, which has none of its own: kept in memory, never written.

    stage, publish, expand      `use` connects as the volume's user, reads the pool's identity, and only then keeps it
    unstage                     `forget`: the user is forgotten with its last volume, and its connection closed
    a restart                   forgets all; the next stage or publish brings a key again (decision 0018)

A user whose key the cluster refuses, or that does not reach the pool, is not kept, and takes no other's place. An
image is read as its volume's user, because that may be all that this user may read. Records are read as the user that
a call has brought last: whoever may use a volume of the pool may read the pool's records.

Which pool this is, the first connection reads: a volume id names its pool, but whoever sends an id can write one, and
the identity also says which cluster the pool was made in. Before that no volume of it is used here, and after a
restart the notes of what is attached (`access`) name it, so what is staged can be unstaged without a key.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping

from crust.blockdriver.engines.pool_access import PoolIds
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.ceph import binding
from crust.ceph.connection import Connection
from crust.ceph.user import CephUser
from crust.core import deferral_keys, errors, volumes

MOST_OPEN = 16
"""Connections at once, of 16 threads and 50 MiB each; others are opened again when their volumes are used."""


class CephKeyNotGiven(errors.NotReady):
    """A node that has no Ceph user of its own was given no key since it was started."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: no key of a Ceph user is known",
            why="this node has none of its own; it gets them with the calls and keeps them in memory, so none has "
            "come since this process was started",
            hint="it goes on with the next stage or publish; set csi.storage.k8s.io/node-stage-secret-name, "
            "node-publish-secret-name and node-expand-secret-name in the StorageClass",
        )


class Users:
    """As whom a node's volumes are reached: as the one user of a process that has a key of its own."""

    def __init__(self, shared: Place) -> None:
        self.shared = shared
        """The pool, as whatever user is known; it raises `CephKeyNotGiven` when it is used and none is."""

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """Take a user for a volume from what a call brought; here nothing: the secrets are the guest's."""

    def place(self, volume_id: volumes.VolumeId) -> Place:
        """The pool, as the volume's user. Raises `CephKeyNotGiven`."""
        return self.shared

    def forget(self, volume_id: volumes.VolumeId) -> None:
        """The volume is not used here any more."""


class VolumeUsers(Users):
    """The users by whose keys this node reaches the pool `pool`/`namespace`. Safe from any thread."""

    def __init__(self, monitors: str, pool: str, namespace: str, noted: Callable[[], str]) -> None:
        """`noted`: the pool's id by what is attached here, or nothing.

        Raises `MonitorsInvalid`, `CephBindingMissing`: they are the start's errors, not the first volume's.
        """
        binding.load()
        CephUser(monitors, "", "")
        self._monitors = monitors
        self._noted = noted
        self._guard = threading.Lock()
        self._ids: PoolIds | None = None
        self._connections: OrderedDict[str, Connection] = OrderedDict()
        """By user, the one that was brought last at the end."""
        self._user_of: dict[volumes.VolumeId, str] = {}
        # as the user that was brought last
        super().__init__(Place(self._last, pool, namespace, is_lent=True))

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """Reach the volume as the user of `secrets`, or as before if there are none.

        Raises `CephKeyMissing`, `CephKeyRefused`, `CephMonitorsUnreachable`, and what `RbdPool.open` does; then
        everything is as it was.
        """
        with self._guard:
            connection = self._known(volume_id)
        if connection is not None and not secrets.get(deferral_keys.USER_KEY):
            return
        name, key = deferral_keys.ceph_user(volume_id, secrets)
        user = CephUser(self._monitors, name, key)
        if self._take(volume_id, user):
            return
        connection = self._connected(user)
        if self._take(volume_id, user):  # another call was first
            connection.close()
        else:
            self._keep(volume_id, connection)

    def place(self, volume_id: volumes.VolumeId) -> Place:
        """The pool, as the volume's user. Raises `CephKeyNotGiven`."""
        with self._guard:
            connection = self._known(volume_id)
        if connection is None:
            raise CephKeyNotGiven(f"cannot look at the image of {volume_id}")
        return Place.of(connection, self.shared.pool, self.shared.namespace)

    def forget(self, volume_id: volumes.VolumeId) -> None:
        """Forget the volume's user, unless another volume has it."""
        with self._guard:
            unused = self._left(self._user_of.pop(volume_id, ""))
        _close(unused)

    @property
    def ids(self) -> PoolIds:
        """As the first connection has read them; before, by the notes; if there are none, of no pool."""
        return self._ids or PoolIds(self._noted())

    @property
    def shown(self) -> str:
        """The pool and the namespace."""
        return self.shared.shown

    def find(self) -> None:
        """Nothing: no key is here."""

    def lock(self) -> None:
        """Nothing: every node uses the pool."""

    def renew(self) -> None:
        """Nothing: a node has no lock."""

    def open(self) -> None:
        """Nothing: the first key opens it."""

    def check_in_place(self) -> None:
        """Nothing: each call finds out for itself, and a pod's key is not used between calls."""

    def let_go(self) -> None:
        """Forget all users, and disconnect when the calls that run have ended."""
        with self._guard:
            connections = tuple(self._connections.values())
            self._connections.clear()
            self._user_of.clear()
        for connection in connections:
            connection.close()

    def _last(self, what: str) -> Connection:
        with self._guard:
            if not self._connections:
                raise CephKeyNotGiven(what)
            return next(reversed(self._connections.values()))

    def _known(self, volume_id: volumes.VolumeId) -> Connection | None:
        return self._connections.get(self._user_of.get(volume_id, ""))

    def _take(self, volume_id: volumes.VolumeId, user: CephUser) -> bool:
        """Whether the user is known with this key, for this volume too from now on."""
        with self._guard:
            connection = self._connections.get(user.user)
            if connection is None or connection.ceph_user != user:
                return False
            unused = self._note(volume_id, user.user)
        _close(unused)
        return True

    def _connected(self, user: CephUser) -> Connection:
        """A connection that reaches the pool."""
        connection = Connection(user)
        try:
            connection.check_namespace(self.shared.pool, self.shared.namespace)
            pool = RbdPool(Place.of(connection, self.shared.pool, self.shared.namespace))
            pool.open()
        except BaseException:
            connection.close()
            raise
        self._ids = pool.ids
        return connection

    def _keep(self, volume_id: volumes.VolumeId, connection: Connection) -> None:
        name = connection.ceph_user.user
        with self._guard:
            replaced = self._connections.pop(name, None)
            self._connections[name] = connection
            unused = self._note(volume_id, name)
            idle = tuple(self._connections.values())[:-MOST_OPEN]
        _close(replaced)
        _close(unused)
        for other in idle:
            other.rest()

    def _note(self, volume_id: volumes.VolumeId, name: str) -> Connection | None:
        """Give the volume its user; returns the connection of the one that it had, as `_left`."""
        previous = self._user_of.get(volume_id, name)
        self._user_of[volume_id] = name
        self._connections.move_to_end(name)
        return self._left(previous)

    def _left(self, name: str) -> Connection | None:
        """The connection of the user, if no volume has that user now; it is not known any more."""
        return None if name in self._user_of.values() else self._connections.pop(name, None)


def _close(connection: Connection | None) -> None:
    if connection is not None:
        connection.close()
