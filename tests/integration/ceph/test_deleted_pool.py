"""A Ceph pool that an administrator has deleted: what a node has of it ends, by the answer of the cluster.

A cluster that cannot be asked, and a pool that only the settings name wrongly, are other things: refused.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from crust.blockdriver.engines.protocol import ImageMissing
from crust.blockdriver.engines.rbd.node import access
from crust.blockdriver.engines.rbd.node.access import RbdAccess, owed
from crust.blockdriver.engines.rbd.node.own_user import OwnUser
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.provisioning.images import VolumeImages
from crust.ceph.connection import Connection
from crust.ceph.failures import CephMonitorsUnreachable, CephPoolMissing
from crust.ceph.user import CephUser
from crust.core import errors, volumes
from crust.host.block.krbd import KernelRbd
from examples.cluster.ceph_cluster import CephCluster
from tests.integration.ceph.conftest import QUICK
from tests.support.ceph.fake_sysfs_rbd import FSID, FakeSysfs

pytestmark = pytest.mark.timeout(240)

POOL = "ends"
VOLUME = volumes.VolumeId("0123456789abcdef-1")


@dataclass
class Node:
    """A node with a volume attached, whose pool can be deleted."""

    ceph: CephCluster
    base: Path
    sysfs: FakeSysfs
    opened: list[Connection]

    def process(self, pool: str = POOL) -> RbdAccess:
        """The node's driver, started again: it knows nothing but the notes and the kernel."""
        who = CephUser(self.ceph.monitors, "admin", self.ceph.keys["client.admin"])
        made = Connection(who, QUICK)
        self.opened.append(made)
        kernel = KernelRbd("node-a", str(self.sysfs.bus), self.sysfs.write, lambda: None)
        return RbdAccess(OwnUser(Place(made, pool, "")), str(self.base), "node-a", kernel)

    def note_mapped(self) -> None:
        """As if the image were mapped for the node itself."""
        note = {"cluster": FSID, "pool": POOL, "namespace": "", "on_host": True}
        (Path(access.directory(str(self.base))) / VOLUME).write_text(json.dumps(note))

    def delete_pool(self) -> None:
        self.ceph.delete_pool(POOL)


@pytest.fixture
def node(ceph: CephCluster, tmp_path: Path) -> Iterator[Node]:
    sysfs = FakeSysfs(tmp_path / "bus")
    sysfs.load()
    ceph.make_pool(POOL)
    made = Node(ceph, tmp_path, sysfs, [])
    try:
        here = made.process()
        VolumeImages(here._users.place(VOLUME)).create(VOLUME, 8 << 20)
        here.attach(VOLUME)
        yield made
    finally:
        for each in made.opened:
            each.close()
        made.delete_pool()


def test_volume_of_a_deleted_pool_is_detached_by_any_process(node: Node) -> None:
    for is_new in (False, True):
        here = node.process()
        here.attach(VOLUME)
        node.delete_pool()
        after = node.process() if is_new else here
        with pytest.raises(errors.CrustError):
            after.attach(VOLUME)
        after.detach(VOLUME)
        assert after.attached_here() == ()
        after.detach(VOLUME)
        node.ceph.make_pool(POOL)
        VolumeImages(node.process()._users.place(VOLUME)).create(VOLUME, 8 << 20)


@pytest.mark.parametrize("process", ["that knew the pool", "new"])
def test_image_of_a_deleted_pool_that_the_kernel_maps_is_unmapped(node: Node, process: str) -> None:
    """Its claim has gone with the pool. This host's kernel has no RBD: what it maps is a directory of the test."""
    here = node.process()
    node.note_mapped()
    node.sysfs.write(
        f"{node.sysfs.bus}/add_single_major",
        f"192.0.2.1:6789 name=node,key={here._devices.kernel._mark}{VOLUME} {POOL} {VOLUME} -".encode(),
    )
    with here._users.place(VOLUME).ioctx("cannot connect"):
        """A process that knows the pool."""
    node.delete_pool()
    (node.process() if process == "new" else here).detach(VOLUME)
    assert list((node.sysfs.bus / "devices").iterdir()) == []
    assert here.attached_here() == owed(str(node.base)) == ()


def test_recreated_pool_is_used_by_a_process_that_knew_it(node: Node) -> None:
    here = node.process()
    here.attach(VOLUME)
    node.delete_pool()
    node.ceph.make_pool(POOL)
    images = VolumeImages(here._users.place(VOLUME))
    with pytest.raises(ImageMissing):
        here.attach(VOLUME)
    images.create(VOLUME, 16 << 20)
    assert here.attach(VOLUME).size_bytes == 16 << 20


def test_pool_that_only_the_settings_name_wrongly_is_no_deleted_one(node: Node) -> None:
    wrong = node.process("nope")
    with pytest.raises(CephPoolMissing):
        wrong.detach(VOLUME)
    assert wrong.attached_here() == (VOLUME,)


def test_cluster_that_cannot_be_asked_tells_nothing_of_its_pools(node: Node) -> None:
    node.delete_pool()
    here = node.process()
    with node.ceph.mon.frozen(), pytest.raises(CephMonitorsUnreachable):
        here.detach(VOLUME)
    assert here.attached_here() == (VOLUME,)
    here.detach(VOLUME)
    assert here.attached_here() == ()
