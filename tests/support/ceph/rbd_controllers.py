"""Controllers of one Ceph pool in this process, each with a connection of its own."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.controller_lock import ControllerLock
from crust.blockdriver.ceph.user import CephUser, Timeouts
from crust.blockdriver.controller.create_volume import Create
from crust.blockdriver.driver import Driver, build
from crust.blockdriver.engines import rbd
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.services.roles import Role
from crust.blockdriver.snapshots.content_source import SourceRequest
from crust.core import volumes
from examples.cluster.ceph_cluster import POOL, CephCluster

CONTROLLER = Role("controller", is_shared=True)
SIZE = volumes.CapacityRange(64 << 20, 0)
RAW = (volumes.VolumeCapability(volumes.BlockAccess(), volumes.AccessMode.SINGLE_NODE_WRITER),)
QUICK = Timeouts(connect_s=3, monitors_s=3, data_s=3)


class Controllers:
    """Controllers of one pool, each with a connection of its own."""

    def __init__(
        self, ceph: CephCluster, base: Path, pool: str = POOL, timeouts: Timeouts = QUICK
    ) -> None:
        self._ceph = ceph
        self._base = base
        self._pool = pool
        self._timeouts = timeouts
        self.namespace = ceph.make_namespace(pool=pool)
        self._user = f"controller-{self.namespace}"
        self._key = ceph.controller(self._user, self.namespace, pool=pool)
        self._made: list[Driver] = []

    def start(self, **settings: Any) -> Driver:
        """The next active one, which has read the pool. The one before is treated as dead at once."""
        driver = self.built(**settings)
        connection = connection_of(driver)
        nonce = uuid.uuid4().hex
        connection.controller_lock = ControllerLock(self._pool, self.namespace, nonce, patience_s=0)
        home = driver.stores.pool
        home.find()
        home.lock()
        driver.open()
        return driver

    def built(self, name: str = "", **settings: Any) -> Driver:
        """A new one, which has done nothing yet; `name` is that of its run directory, `settings` are of `build`."""
        connection = Connection(
            CephUser(self._ceph.monitors, self._user, self._key), self._timeouts
        )
        run_dir = str(self._base / (name or uuid.uuid4().hex))
        engine = rbd.engine(
            Namespace.of(connection, self._pool, self.namespace), run_dir=run_dir, create=True
        )
        driver = build(
            engine=engine, run_dir=run_dir, node_id="controller", role=CONTROLLER, **settings
        )
        self._made.append(driver)
        return driver

    @contextmanager
    def image(self, name: str) -> Iterator[Any]:
        """An image of the pool, opened by an administrator."""
        import rbd as librbd

        with (
            self._ceph.ioctx(self._pool, self.namespace) as ioctx,
            librbd.Image(ioctx, name) as image,
        ):
            yield image

    def end(self) -> None:
        for driver in self._made:
            driver.stores.pool.let_go()
            connection_of(driver).close()


def connection_of(driver: Driver) -> Connection:
    place: Namespace = driver.stores.provisioning.place  # type: ignore[attr-defined]
    assert isinstance(place.connection, Connection)
    return place.connection


def create_request(name: str, source: SourceRequest | None = None) -> Create:
    return Create(name, SIZE, RAW, source=source)


async def created(
    driver: Driver, name: str, source: SourceRequest | None = None
) -> volumes.VolumeId:
    """Create a raw volume; its id."""
    create = create_request(name, source)
    return (await driver.controller.provisioner.create(create)).volume_id
