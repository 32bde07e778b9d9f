"""The pool's identity and records in a real cluster."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import rbd

from crust.blockdriver.ceph import omap
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.user import CephUser
from crust.blockdriver.engines.pool_access import PoolAbsent, RecordKind, UnknownPoolLayout
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.pool import OBJECT, SCHEMA, RbdPool, RbdPoolUnreadable
from crust.blockdriver.engines.rbd.records import RbdContentRecords, RbdRecords, object_name, store
from crust.cli import layouts
from crust.cli.programs import daemons
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.integration.ceph.conftest import QUICK
from tests.support.ceph import rbd_driver
from tests.support.raised import raised
from tests.support.records import record_store_contract


@pytest.fixture
def other(controller: CephUser) -> Iterator[Connection]:
    """Another controller's connection."""
    made = Connection(controller, QUICK)
    yield made
    made.close()


@pytest.fixture
def place(connection: Connection, namespace: str) -> Namespace:
    """The namespace, without a pool."""
    return Namespace.of(connection, POOL, namespace)


@pytest.fixture
def pool(place: Namespace) -> RbdPool:
    """A new pool in the namespace."""
    made = RbdPool(place, create=True)
    made.open()
    return made


@pytest.mark.parametrize("kind", [RecordKind.VOLUMES, RecordKind.CONTENT])
@pytest.mark.parametrize("check", record_store_contract.CHECKS, ids=lambda check: check.__name__)
def test_records_keep_to_the_contract_of_stores(
    check: Callable[[record_store_contract.Maker, record_store_contract.Make], None],
    kind: RecordKind,
    pool: RbdPool,
    connection: Connection,
    other: Connection,
    namespace: str,
) -> None:
    """Each store is another controller's."""
    both = iter([connection, other] * 8)

    def make(key: str, data: bytes) -> None:
        place = Namespace.of(connection, POOL, namespace)
        if kind is RecordKind.CONTENT:
            RbdContentRecords(place).make(key, data)
        else:
            _make(place, key, data)

    check(lambda: store(Namespace.of(next(both), POOL, namespace), kind), make)


def _make(place: Namespace, key: str, data: bytes) -> None:
    records = RbdRecords(place, RecordKind.VOLUMES)
    records.begin(key)
    records.commit(key, data)


def test_record_of_any_bytes_is_compared_as_it_is(pool: RbdPool, place: Namespace) -> None:
    """librados compares the omap values of the binding as text, and counts characters."""
    records = RbdRecords(place, RecordKind.VOLUMES)
    first, second = "é\0€".encode(), b"\xff\x00" * 100
    _make(place, "a", first)
    records.save("a", second, previous=first)
    assert records.load("a") == second


def test_more_records_than_fit_a_page_are_listed(
    pool: RbdPool, place: Namespace, connection: Connection, namespace: str
) -> None:
    name, count = object_name(RecordKind.VOLUMES), 2345
    with place.ioctx("cannot write") as ioctx:
        omap.swap(ioctx, name, {}, {f"v.{number:05}": b"x" for number in range(count)})
    assert RbdRecords(place, RecordKind.VOLUMES).ids() == tuple(f"{n:05}" for n in range(count))


def test_records_that_were_removed_are_no_empty_pool(pool: RbdPool, place: Namespace) -> None:
    records = RbdRecords(place, RecordKind.VOLUMES)
    with place.ioctx("cannot remove") as ioctx:
        ioctx.remove_object(object_name(RecordKind.VOLUMES))
    for act in (
        records.ids,
        lambda: records.save("a", b"1", previous=b"0"),
        lambda: records.begin("a"),
    ):
        with pytest.raises(PoolAbsent):
            act()
    with place.ioctx("cannot look") as ioctx, pytest.raises(Exception, match="stat"):
        ioctx.stat(object_name(RecordKind.VOLUMES))


def test_empty_namespace_becomes_a_pool_only_on_request(place: Namespace) -> None:
    with pytest.raises(PoolAbsent):
        RbdPool(place).find()
    made = RbdPool(place, create=True)
    made.open()
    again = RbdPool(place)
    again.open()
    assert again.ids == made.ids
    again.check_in_place()


def test_of_controllers_that_start_at_once_one_makes_the_pool(
    controller: CephUser, namespace: str
) -> None:
    ready = threading.Barrier(8, timeout=60)

    def start() -> str:
        connection = Connection(controller, QUICK)
        try:
            pool = RbdPool(Namespace.of(connection, POOL, namespace), create=True)
            pool.find()
            ready.wait()
            pool.open()
            return pool.ids.pool_id
        finally:
            connection.close()

    with ThreadPoolExecutor(8) as threads:
        started = [threads.submit(start) for _ in range(8)]
        assert len({start.result() for start in started}) == 1


def test_namespace_with_images_is_not_treated_as_empty(
    ceph: CephCluster, place: Namespace, namespace: str
) -> None:
    with ceph.ioctx(POOL, namespace) as ioctx:
        rbd.RBD().create(ioctx, "somebodys", 1 << 20)
    with raised("RbdPoolNotEmpty", match="somebodys"):
        RbdPool(place, create=True).open()


def test_pool_that_lost_its_identity_is_absent(pool: RbdPool, place: Namespace) -> None:
    with place.ioctx("cannot remove") as ioctx:
        ioctx.remove_object(OBJECT)
    with pytest.raises(PoolAbsent):
        pool.check_in_place()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b'{"pool_id": "0123456789abcdef", "created": "", "fsid": ""}',
        b'{"schema": %d, "pool_id": "0123456789abcdef", "created": "", "fsid": "another"}' % SCHEMA,
    ],
    ids=["empty", "no fields", "no schema", "of another cluster"],
)
def test_identity_that_is_not_this_pools_is_named(
    pool: RbdPool, place: Namespace, text: bytes
) -> None:
    with place.ioctx("cannot write") as ioctx:
        omap.swap(ioctx, OBJECT, {}, {"identity": text})
    why = "another" if b"another" in text else "cannot be read"
    for starting in (pool, RbdPool(place)):
        with pytest.raises(RbdPoolUnreadable, match=why):
            starting.open()


@pytest.mark.parametrize("number", [0, SCHEMA - 1, SCHEMA + 1])
def test_pool_of_another_schema_is_refused(pool: RbdPool, place: Namespace, number: int) -> None:
    text = b'{"schema": %d, "pool_id": "0123456789abcdef", "of": "another form"}' % number
    with place.ioctx("cannot write") as ioctx:
        omap.swap(ioctx, OBJECT, {}, {"identity": text})
    for starting in (pool, RbdPool(place, create=True)):
        with pytest.raises(UnknownPoolLayout, match=f"schema {number},"):
            starting.find()


@pytest.mark.parametrize("raised", [0, 1])
def test_controller_that_does_not_read_its_pool_is_named(
    ceph: CephCluster,
    controller: CephUser,
    pool: RbdPool,
    place: Namespace,
    tmp_path: Path,
    raised: int,
) -> None:
    """Before a restart: `crust install` and `crust config check`."""
    key = rbd_driver.key_file(tmp_path, controller.key)
    own = {"namespace": place.namespace, "user": controller.user, "key_file": key}
    top = 'mode = "controller"\nsocket = "/run/s"\n'
    if raised:
        text = b'{"schema": %d, "pool_id": "0123456789abcdef"}' % (SCHEMA + 1)
        with place.ioctx("cannot write") as ioctx:
            omap.swap(ioctx, OBJECT, {}, {"identity": text})
    settings = daemons.load("driver", rbd_driver.settings(ceph, top=top, **own))
    named = [f"schema {SCHEMA + 1}," in each for each in layouts.unread(settings)]
    assert named == [True] * raised


def test_namespace_that_is_missing_is_named(ceph: CephCluster) -> None:
    connection = Connection(CephUser(ceph.monitors, "admin", ceph.keys["client.admin"]), QUICK)
    with raised("CephNamespaceMissing"):
        RbdPool(Namespace.of(connection, POOL, "no-such-namespace"), create=True).find()
    connection.close()
