"""The pool in a namespace of Ceph: its identity, by which the driver recognizes its pool.

    crust.pool       {"schema": 3, "pool_id": "…", "created": "…", "fsid": "…"}, an object written once

The schema is read first, and a pool of another one is not opened (`UnknownPoolLayout`). Schema 1 had another form of
snapshots and of what is half made; schema 2 did not record who may parse a content.

The object is created exclusively, so of several controllers that start at an empty namespace one makes the pool and
the others find it. A namespace with images and without this object is not treated as empty: the pool's volumes would
be unknown. The cluster's id is in it too: a pool that was copied to another cluster is another pool.

One controller changes the pool at a time, by the pool's lock (`crust.blockdriver.ceph.controller_lock`). The lock's
nonce is a file of the run directory, which one process has at a time: a process that finds its own nonce in the lock
succeeds an ended process, and does not wait.
"""

import datetime
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated

import pydantic

from crust.blockdriver import schema
from crust.blockdriver.ceph import binding, claim_object, controller_lock, omap
from crust.blockdriver.ceph.controller_lock import ControllerLock
from crust.blockdriver.engines import pool_access
from crust.blockdriver.engines.pool_access import PoolAbsent, PoolIds, RecordKind
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.records import CONTENT, object_name, present
from crust.core import errors
from crust.host.files import durable

OBJECT = "crust.pool"
SCHEMA = 3
_KEY = "identity"
_NONCE = "controller"
"""In the run directory."""
_MOST_ANCESTORS = 100


class RbdPoolUnreadable(errors.Corrupt):
    def __init__(self, shown: str, why: str) -> None:
        super().__init__(
            f"the identity of {shown} cannot be read",
            why=why,
            hint=f"restore the object {OBJECT}, or run the version that wrote it",
        )


@dataclass(frozen=True, slots=True)
class _Identity:
    pool_id: Annotated[str, pydantic.Field(pattern=rf"^{pool_access.POOL_ID}$")]
    created: str
    fsid: str
    schema: int = SCHEMA


_STORED = pydantic.TypeAdapter(_Identity)


@dataclass(eq=False)
class RbdPool:
    """The pool in `place`. With `create` the first start at an empty namespace makes it. `on_close` ends the
    background users of the connection. Only a controller has a `run_dir`, and takes the pool's lock.
    """

    _place: Namespace
    _: KW_ONLY
    run_dir: str = ""
    create: bool = False
    on_close: Callable[[], object] = lambda: None
    _ids: PoolIds | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.shown = self._place.shown

    @property
    def ids(self) -> PoolIds:
        if self._ids is None:
            raise self._absent("it was never opened")
        return self._ids

    def find(self) -> None:
        """Connect, and look for the identity. Raises as `Connection`, RbdPoolNotEmpty, `RbdPoolUnreadable` and
        `UnknownPoolLayout`.

        If the cluster does not answer, the next call uses a new connection: a client that connects while OSD and
        monitors restart may never learn that the OSD is back.
        """
        connection = self._place.connection
        connection.reopen()
        try:
            connection.check_namespace(self._place.pool, self._place.namespace)
            if self._identity() is None:
                self._check_makeable()
        except PoolAbsent:
            raise  # an answer
        except errors.PeerUnavailable:
            connection.close()
            raise

    def lock(self) -> None:
        """Become the pool's active controller. Raises `ControllerStandsBy`, and `PoolAbsent` without the lock."""
        if not self.run_dir:
            return
        connection = self._place.connection
        if connection.controller_lock is None:
            path = os.path.join(self.run_dir, _NONCE)
            durable.make_directories(self.run_dir, 0o700)
            with suppress(durable.PathAlreadyExists):
                durable.write_file(path, secrets.token_hex(8).encode(), replaces=False)
            nonce = durable.read(path, limit_bytes=64).decode("ascii", "replace")
            place = self._place
            connection.controller_lock = ControllerLock(place.pool, place.namespace, nonce)
        lock = connection.controller_lock
        with self._place.ioctx(f"cannot take the lock of {self.shown}") as ioctx:
            if self._identity() is None:
                # together with the pool: in a full pool a key can be set, but no object be made
                omap.make(ioctx, controller_lock.OBJECT)
            address = connection.address()
            with present(self._place, controller_lock.OBJECT):
                lock.take(ioctx, address, lambda dead: connection.blocklist((dead,)))
            if connection.address() != address:
                # it was cut off meanwhile: the next look takes the lock again
                raise binding.CephClientBlocklisted(connection.ceph_user.user, address)

    def renew(self) -> None:
        lock = self._place.connection.controller_lock
        if lock is not None:
            with self._place.ioctx(f"cannot renew the lock of {self.shown}") as ioctx:
                lock.renew(ioctx)

    def open(self) -> None:
        identity = self._identity()
        if identity is None:
            self._check_makeable()
            created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            made = _Identity(secrets.token_hex(8), created, self._place.connection.fsid())
            with self._place.ioctx(f"cannot make {self.shown}") as ioctx:
                for kind in set(RecordKind) - {RecordKind.CONTENT}:
                    omap.make(ioctx, object_name(kind))  # before the identity, which shows them
                # librbd makes it at the first delete, and cannot in a full pool, which needs the delete most
                omap.make(ioctx, "rbd_trash")
                omap.swap(ioctx, OBJECT, None, {_KEY: _STORED.dump_json(made)})
                identity = self._identity() or made
        fsid = self._place.connection.fsid()
        if identity.fsid != fsid:
            raise RbdPoolUnreadable(
                self.shown, f"it was made in the cluster {identity.fsid}, and this one is {fsid}"
            )
        self._ids = PoolIds(identity.pool_id)

    def check_in_place(self) -> None:
        """Read the identity again: one small read."""
        identity = self._identity()
        if identity is None or PoolIds(identity.pool_id) != self._ids:
            raise self._absent(f"its object {OBJECT} is gone, or another pool's")

    def let_go(self) -> None:
        """Give the lock back and disconnect, after running calls have ended (`Connection.close`). A controller that
        stands by stays connected: it looks at the lock each second.
        """
        self.on_close()
        connection = self._place.connection
        if connection.controller_lock is None or connection.controller_lock.is_ours:
            connection.close()

    def _check_makeable(self) -> None:
        with self._place.ioctx(f"cannot list {self.shown}") as ioctx:
            image = next(iter(self._place.names(ioctx)), "")
        if image:
            raise errors.Corrupt.named(
                "RbdPoolNotEmpty",
                f"{self.shown} is no pool of crust, and is not made one",
                why=f"it has the image {image} and no object {OBJECT}",
            )
        if not self.create:
            raise self._absent(f"it has no object {OBJECT}")

    def _identity(self) -> _Identity | None:
        data = None
        error_text = f"cannot read the identity of {self.shown}"
        with self._place.ioctx(error_text) as ioctx, binding.ignoring(errno.ENOENT):
            data = omap.read_keys(ioctx, OBJECT, (_KEY,)).get(_KEY, b"")
        if data is None:
            return None
        try:
            return schema.read(_STORED.validate_json, data, SCHEMA)
        except schema.OtherSchema as err:
            raise pool_access.UnknownPoolLayout(self.shown, f"its object {OBJECT}: {err}") from err
        except schema.Unreadable as err:
            raise RbdPoolUnreadable(self.shown, str(err)) from err

    def _absent(self, why: str) -> PoolAbsent:
        return PoolAbsent(
            f"the pool is not in {self.shown}",
            why=why,
            hint="correct `pool` and `namespace`; for a new pool set create_pool",
        )


def capabilities(ioctx: binding.Ioctx, pool: str, namespace: str, image: str) -> str:
    """The `osd` part of the capabilities of a user for one volume: the user can open and write its image, and read
    no other image's data. Raises the binding's own errors.

    Ceph compares prefixes of objects' names: an image's objects have its id, the claim has its name. A clone reads
    the data that it shares with its ancestors, so the user can read these until the clone is flattened. The user can
    read the records of the namespace. The content record, which nodes write, is in an object of the volume.
    """
    image_id, *ancestors = _ids(ioctx, image)
    writable = [*_objects(image_id), f"{claim_object.PREFIX}{image}", f"{CONTENT}{image}"]
    lock = controller_lock.OBJECT
    readable = [f"rbd_id.{image}", "rbd_directory", OBJECT, "crust.records.", lock]
    for ancestor in ancestors:
        readable += _objects(ancestor)
    where = f"pool={pool} namespace={namespace} object_prefix"
    caps = [f"allow rwx {where} {prefix}" for prefix in writable]
    caps += [f"allow rx {where} {prefix}" for prefix in readable]
    # the list of namespaces is in the pool's default namespace
    caps += [f"allow rx pool={pool} object_prefix {name}" for name in ("rbd_namespace", "rbd_info")]
    return ", ".join(caps)


def _objects(image_id: str) -> list[str]:
    return [f"rbd_data.{image_id}.", f"rbd_header.{image_id}", f"rbd_object_map.{image_id}"]


def _ids(ioctx: binding.Ioctx, image: str) -> Iterator[str]:
    """The ids of the image and of the images with which it shares data; one of them may be in the trash."""
    rbd = binding.load().rbd
    name = {"name": image}
    for _ in range(_MOST_ANCESTORS):
        with rbd.Image(ioctx, read_only=True, **name) as opened:
            yield str(opened.id())
            try:
                name = {"image_id": str(opened.parent_id())}
            except rbd.ImageNotFound:
                return
