"""Clients that claim and open one image of a Ceph pool, as runtimes and the controller do."""

import contextlib
import datetime
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import rbd

from crust.blockdriver.ceph import claim_object, claims, controller_lock, omap
from crust.blockdriver.ceph.claim_object import Mode
from crust.blockdriver.ceph.claims import Host
from crust.blockdriver.ceph.cluster_image import ClusterImage
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.controller_lock import ControllerLock
from crust.blockdriver.ceph.user import CephUser, Timeouts
from examples.cluster.ceph_cluster import POOL, CephCluster

A, B = Host("node-a", "machine-a"), Host("node-b", "machine-b")
IMAGE = "vol-1"
SIZE = 8 << 20
LONG_S = 9 * 365 * 86400
"""A blocklist's expiry that no process outlives."""


@dataclass
class Client:
    """A connection of its own, with a node's or the controller's user; its open images are a hypervisor's."""

    connection: Connection
    ioctx: Any
    images: list[Any] = field(default_factory=list)

    def open(self) -> Any:
        """Open the image as a hypervisor does."""
        image = rbd.Image(self.ioctx, IMAGE)
        self.images.append(image)
        return image

    def close(self) -> None:
        """Close what it has open."""
        while self.images:
            self.images.pop().close()

    def lead(self) -> None:
        """Be the active controller of the pool."""
        omap.make(self.ioctx, controller_lock.OBJECT)
        lock = ControllerLock(POOL, "", nonce=uuid.uuid4().hex)
        lock.take(self.ioctx, self.address, lambda address: self.connection.blocklist([address]))

    @property
    def address(self) -> str:
        """As the blocklist has it."""
        return self.connection.address()

    @property
    def image(self) -> ClusterImage:
        return ClusterImage(self.connection, self.ioctx, IMAGE)


@dataclass
class Bench:
    """Makes clients of one namespace."""

    ceph: CephCluster
    namespace: str
    held: ExitStack

    def client(self, user: str, key: str) -> Client:
        connection = Connection(CephUser(self.ceph.monitors, user, key), Timeouts(10, 10, 10))
        self.held.callback(connection.close)
        ioctx = self.held.enter_context(connection.pool(POOL, self.namespace, "cannot test"))
        client = Client(connection, ioctx)
        self.held.callback(client.close)
        return client

    def node(self) -> Client:
        """A client with a node's rights."""
        name = f"node-{uuid.uuid4().hex[:8]}"
        return self.client(name, self.ceph.node(name, self.namespace))

    def controller(self) -> Client:
        """A client with the controller's rights."""
        name = f"controller-{uuid.uuid4().hex[:8]}"
        return self.client(name, self.ceph.controller(name, self.namespace))

    def blocklist(self) -> dict[str, float]:
        """The blocklisted addresses, and for how many seconds more."""
        text = self.ceph.command("osd dump", format="json").decode()
        now = datetime.datetime.now(datetime.UTC)
        return {
            address: (datetime.datetime.fromisoformat(until) - now).total_seconds()
            for address, until in json.loads(text)["blocklist"].items()
        }


def take(
    client: Client, host: Host, sandbox: str = "sandbox", mode: Mode = Mode.WRITER, vm: str = ""
) -> claim_object.Holder:
    """Take the image, for a virtual machine of its own if it is not named."""
    return claims.take(client.image, mode, host, sandbox, vm or uuid.uuid4().hex)


def at_once(number: int, work: Callable[[int], None]) -> None:
    """Do the work in so many threads that begin together, each with its number."""
    start = threading.Barrier(number)

    def begin(place: int) -> None:
        start.wait()
        work(place)

    with ThreadPoolExecutor(number) as threads:
        list(threads.map(begin, range(number)))


def attached(client: Client, host: Host, sandbox: str = "sandbox-1") -> tuple[Any, str]:
    """The steps of an attach; the open image and the holder's id."""
    holder = take(client, host, sandbox)
    image = client.open()
    assert claims.record(client.image, holder.id) == client.address
    return image, holder.id


@contextlib.contextmanager
def as_admin(ceph: CephCluster, namespace: str, image: str) -> Iterator[ClusterImage]:
    """An image, as a client that may do everything."""
    connection = Connection(CephUser(ceph.monitors, "admin", ceph.keys["client.admin"]))
    try:
        with connection.pool(POOL, namespace, "cannot test") as ioctx:
            yield ClusterImage(connection, ioctx, image)
    finally:
        connection.close()


def write(image: Any, data: bytes, offset: int = 0) -> None:
    """Write as a guest does that flushes."""
    image.write(data, offset)
    image.flush()


def check_cut_off(image: Any) -> None:
    """Neither a write nor the flush of one reaches the cluster."""
    try:
        image.write(b"late__", 0)
    except rbd.Error:
        return
    with pytest.raises(rbd.Error):
        image.flush()
