"""The users of Ceph of a node without a key of its own: calls bring their keys, which stay in memory.

    stage, publish, expand      `use` connects as the volume's user, reads the pool's identity, and only then keeps it
    unstage                     `forget`: the user is forgotten with its last volume, and its connection closed
    a restart                   forgets all; the next stage or publish brings a key again (decision 0018)

A user whose key the cluster refuses, or that does not reach the pool, is not kept, and replaces no other. The node
reads an image as its volume's user, because this user may have no other right. It reads records as the user of the
last call: every user of a volume of the pool may read the pool's records.

The first connection reads the pool's identity: a volume id names its pool, but a caller can invent one, and the
identity also names the cluster in which the pool was made. Before that the node uses no volume of it, and after a
restart the notes of attachments (`access`) name the pool, so staged volumes can be unstaged without a key.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from crust.blockdriver.ceph.binding import load
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.user import CephUser
from crust.blockdriver.engines.pool_access import PoolIds
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.core import deferral_keys, errors, volumes

MOST_OPEN = 16
"""Connections at once, of 16 threads and 50 MiB each; others are opened again when their volumes are used."""


class CephKeyNotGiven(errors.NotReady):
    def __init__(self, error_text: str) -> None:
        super().__init__(
            f"{error_text}: no key of a Ceph user is known",
            why="this node has no key of its own; it gets keys with the calls and keeps them in memory, and no call "
            "has brought one since this process was started",
        )


@dataclass(eq=False)
class Users:
    """The user as which a node reaches its volumes: the one user of a process with a key of its own."""

    shared: Namespace
    """The pool, as any known user; its use raises `CephKeyNotGiven` if none is known."""

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """Take a volume's user from the secrets of a call; nothing here: the secrets are the guest's."""

    def place(self, volume_id: volumes.VolumeId) -> Namespace:
        """The pool, as the volume's user. Raises `CephKeyNotGiven`."""
        return self.shared

    def forget(self, volume_id: volumes.VolumeId) -> None:
        """Forget the user of a volume that this node does not use any more."""


class VolumeUsers(Users):
    """The users by whose keys this node reaches the pool `pool`/`namespace`. Safe from any thread."""

    def __init__(self, monitors: str, pool: str, namespace: str, noted: Callable[[], str]) -> None:
        """`noted`: the pool's id by the notes of attachments, or nothing.

        Raises `MonitorsInvalid`, `CephBindingMissing`: the start fails, and not the first volume.
        """
        load()
        CephUser(monitors, "", "")
        self._monitors = monitors
        self._noted = noted
        self._guard = threading.Lock()
        self._ids: PoolIds | None = None
        self._connections: OrderedDict[str, Connection] = OrderedDict()
        """By user, the user of the last call at the end."""
        self._user_of: dict[volumes.VolumeId, str] = {}
        # as the user of the last call
        super().__init__(Namespace(self._last, pool, namespace, is_lent=True))
        self.shown = self.shared.shown

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """Reach the volume as the user of `secrets`, or as before if there are none.

        Raises `CephKeyMissing`, `CephKeyRefused`, `CephMonitorsUnreachable`, and the errors of `RbdPool.open`; then
        nothing has changed.
        """
        with self._guard:
            connection = self._connections.get(self._user_of.get(volume_id, ""))
        if connection is not None and not secrets.get(deferral_keys.USER_KEY):
            return
        name, key = deferral_keys.ceph_user(volume_id, secrets)
        user = CephUser(self._monitors, name, key)
        if self._take(volume_id, user):
            return
        connection = Connection(user)
        try:
            connection.check_namespace(self.shared.pool, self.shared.namespace)
            pool = RbdPool(Namespace.of(connection, self.shared.pool, self.shared.namespace))
            pool.open()
        except BaseException:
            connection.close()
            raise
        self._ids = pool.ids
        if self._take(volume_id, user):  # another call was first
            connection.close()
            return
        with self._guard:
            replaced = self._connections.pop(name, None)
            self._connections[name] = connection
            unused = self._note(volume_id, name)
            idle = tuple(self._connections.values())[:-MOST_OPEN]
        for old in filter(None, (replaced, unused)):
            old.close()
        for other in idle:
            other.rest()

    def place(self, volume_id: volumes.VolumeId) -> Namespace:
        with self._guard:
            connection = self._connections.get(self._user_of.get(volume_id, ""))
        if connection is None:
            raise CephKeyNotGiven(f"cannot look at the image of {volume_id}")
        return Namespace.of(connection, self.shared.pool, self.shared.namespace)

    def forget(self, volume_id: volumes.VolumeId) -> None:
        """Forget the volume's user, unless another volume has it."""
        with self._guard:
            unused = self._left(self._user_of.pop(volume_id, ""))
        if unused is not None:
            unused.close()

    @property
    def ids(self) -> PoolIds:
        """From the first connection; before, from the notes; without notes, of no pool."""
        return self._ids or PoolIds(self._noted())

    def find(self) -> None:
        """Nothing: this node has no key."""

    def lock(self) -> None:
        """Nothing: every node uses the pool."""

    def renew(self) -> None:
        """Nothing: a node has no lock."""

    def open(self) -> None:
        """Nothing: the first key opens it."""

    def check_in_place(self) -> None:
        """Nothing: each call checks by itself, and a pod's key is not used between calls."""

    def let_go(self) -> None:
        """Forget all users, and disconnect after running calls have ended."""
        with self._guard:
            connections = tuple(self._connections.values())
            self._connections.clear()
            self._user_of.clear()
        for connection in connections:
            connection.close()

    def _last(self, error_text: str) -> Connection:
        with self._guard:
            if not self._connections:
                raise CephKeyNotGiven(error_text)
            return next(reversed(self._connections.values()))

    def _take(self, volume_id: volumes.VolumeId, user: CephUser) -> bool:
        """Give the volume this user, if it is known with this key; returns whether it is."""
        with self._guard:
            connection = self._connections.get(user.user)
            if connection is None or connection.ceph_user != user:
                return False
            unused = self._note(volume_id, user.user)
        if unused is not None:
            unused.close()
        return True

    def _note(self, volume_id: volumes.VolumeId, name: str) -> Connection | None:
        """Give the volume its user; returns the connection of its previous user, as `_left`."""
        previous = self._user_of.get(volume_id, name)
        self._user_of[volume_id] = name
        self._connections.move_to_end(name)
        return self._left(previous)

    def _left(self, name: str) -> Connection | None:
        """Forget the user and return its connection, if no volume has that user now."""
        return None if name in self._user_of.values() else self._connections.pop(name, None)
