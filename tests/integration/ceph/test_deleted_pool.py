"""What an administrator has deleted, set wrongly or used up in Ceph: each call's code, error and remedy."""

import json
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import rados
import rbd

from crust.blockdriver.ceph import attach, claim_object
from crust.blockdriver.ceph.binding import CephMonitorsUnreachable, CephPoolMissing
from crust.blockdriver.ceph.claim_object import Mode
from crust.blockdriver.ceph.claims import Host
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.user import CephUser
from crust.blockdriver.engines.protocol import ImageMissing
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.node import access
from crust.blockdriver.engines.rbd.node.access import RbdAccess
from crust.blockdriver.engines.rbd.node.volume_users import Users
from crust.blockdriver.engines.rbd.pool import capabilities
from crust.blockdriver.engines.rbd.provisioning.copies import NewRbdVolume
from crust.blockdriver.engines.rbd.provisioning.snapshots import RbdSnapshots
from crust.blockdriver.engines.rbd.records import CONTENT
from crust.blockdriver.host.krbd import KernelRbd
from crust.core import errors, volumes
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.integration.ceph.conftest import QUICK
from tests.support.ceph import rbd_driver
from tests.support.ceph.fake_sysfs_rbd import FSID, FakeSysfs
from tests.support.ceph.rbd_node import WRITERS, RbdNode
from tests.support.faults.refusals import refused

ENDS = "ends"
VOLUME = volumes.VolumeId("0123456789abcdef-1")


@dataclass
class Node:
    """A node with a volume attached, whose pool can be deleted."""

    ceph: CephCluster
    base: Path
    sysfs: FakeSysfs
    opened: list[Connection]

    def process(self, pool: str = ENDS) -> RbdAccess:
        """The node's driver, started again: it knows nothing but the notes and the kernel."""
        who = CephUser(self.ceph.monitors, "admin", self.ceph.keys["client.admin"])
        made = Connection(who, QUICK)
        self.opened.append(made)
        kernel = KernelRbd("node-a", str(self.sysfs.bus), self.sysfs.write, lambda: None)
        return RbdAccess(Users(Namespace.of(made, pool, "")), str(self.base), "node-a", kernel)

    def note_mapped(self) -> None:
        """As if the image were mapped for the node itself."""
        image = asdict(volumes.NetworkImage(FSID, ENDS, "", VOLUME, (), "admin"))
        note = Path(access.directory(str(self.base))) / VOLUME
        note.write_text(json.dumps({"image": image, "on_host": True}))

    def delete_pool(self) -> None:
        self.ceph.delete_pool(ENDS)


def make(here: RbdAccess, size_bytes: int) -> None:
    """Make the image of the volume."""
    NewRbdVolume(RbdSnapshots(here._users.place(VOLUME)), VOLUME).create(size_bytes)


@pytest.fixture
def doomed(ceph: CephCluster, tmp_path: Path) -> Iterator[Node]:
    sysfs = FakeSysfs(tmp_path / "bus")
    sysfs.load()
    ceph.make_pool(ENDS)
    made = Node(ceph, tmp_path, sysfs, [])
    try:
        here = made.process()
        make(here, 8 << 20)
        here.attach(VOLUME)
        yield made
    finally:
        for connection in made.opened:
            connection.close()
        made.delete_pool()


def test_volume_of_a_deleted_pool_is_detached_by_any_process(doomed: Node) -> None:
    for is_new in (False, True):
        here = doomed.process()
        here.attach(VOLUME)
        doomed.delete_pool()
        after = doomed.process() if is_new else here
        with pytest.raises(errors.CrustError):
            after.attach(VOLUME)
        after.detach(VOLUME)
        assert after.attached_here() == ()
        after.detach(VOLUME)
        doomed.ceph.make_pool(ENDS)
        make(doomed.process(), 8 << 20)


@pytest.mark.parametrize("process", ["that knew the pool", "new"])
def test_image_of_deleted_pool_that_kernel_maps_is_unmapped(doomed: Node, process: str) -> None:
    """Its claim has gone with the pool. This host's kernel has no RBD: what it maps is a directory of the test."""
    here = doomed.process()
    doomed.note_mapped()
    doomed.sysfs.write(
        f"{doomed.sysfs.bus}/add_single_major",
        f"192.0.2.1:6789 name=node,key={here._devices.kernel._mark}{VOLUME} {ENDS} {VOLUME} -".encode(),
    )
    with here._users.place(VOLUME).ioctx("cannot connect"):
        """A process that knows the pool."""
    doomed.delete_pool()
    (doomed.process() if process == "new" else here).detach(VOLUME)
    assert list((doomed.sysfs.bus / "devices").iterdir()) == []
    assert here.attached_here() == ()


def test_recreated_pool_is_used_by_a_process_that_knew_it(doomed: Node) -> None:
    here = doomed.process()
    here.attach(VOLUME)
    doomed.delete_pool()
    doomed.ceph.make_pool(ENDS)
    with pytest.raises(ImageMissing):
        here.attach(VOLUME)
    make(here, 16 << 20)
    assert here.attach(VOLUME).size_bytes == 16 << 20


def test_pool_that_only_settings_name_wrongly_is_no_deleted_one(doomed: Node) -> None:
    wrong = doomed.process("nope")
    with pytest.raises(CephPoolMissing):
        wrong.detach(VOLUME)
    assert wrong.attached_here() == (VOLUME,)


def test_cluster_that_cannot_be_asked_tells_nothing_of_its_pools(doomed: Node) -> None:
    doomed.delete_pool()
    here = doomed.process()
    with doomed.ceph.mon.frozen(), pytest.raises(CephMonitorsUnreachable):
        here.detach(VOLUME)
    assert here.attached_here() == (VOLUME,)
    here.detach(VOLUME)
    assert here.attached_here() == ()


Code = grpc.StatusCode
REFUSED = Code.PERMISSION_DENIED
HERE = Host("node-of-the-tests", "machine")


def of_one_volume(ceph: CephCluster, namespace: str, volume: str) -> dict[str, str]:
    """The secrets of a user for one volume, as `crust ceph caps` makes it."""
    with ceph.ioctx(POOL, namespace) as ioctx:
        osd = capabilities(ioctx, POOL, namespace, volume)
    name = f"volume-{uuid.uuid4().hex[:8]}"
    return {"userID": name, "userKey": ceph.user(name, {"mon": "allow r", "osd": osd})}


async def test_key_of_one_volume_stages_and_publishes_no_other(node: RbdNode) -> None:
    mine, other = await node.create("one"), await node.create("two")
    secrets = of_one_volume(node.ceph, node.namespace, mine)
    await node.stage(mine, secrets)
    answer = await node.publish(mine, secrets)
    assert answer.secrets["userKey"] == secrets["userKey"]
    await refused(node.stage(other, secrets), REFUSED, "CephNotPermitted")
    await node.leave(mine)
    assert node.notes() == []


async def test_key_of_one_volume_opens_no_other_image_for_guest(node: RbdNode) -> None:
    """What a runtime does, and then what whoever has the key could do past crust."""
    mine, other = await node.create("one"), await node.create("two")
    secrets = of_one_volume(node.ceph, node.namespace, mine)
    image = _image(node, mine, secrets)
    async with attach.asking(attach.Key(image, secrets["userKey"])) as asked:
        await asked.take(Mode.WRITER, HERE, "sandbox-1", "vm-1")
        with _opened(node, secrets, mine) as guest:
            await asked.record("vm-1")
            guest.write(b"mine", 0)
            guest.flush()
        await asked.give_back("vm-1")
    elsewhere = _image(node, other, secrets)
    with pytest.raises(errors.Refused) as caught:
        async with attach.asking(attach.Key(elsewhere, secrets["userKey"])) as asked:
            await asked.take(Mode.WRITER, HERE, "sandbox-1", "vm-1")
    assert caught.value.error_name == "CephNotPermitted"
    with pytest.raises(rbd.PermissionError), _opened(node, secrets, other):
        pass
    with _ioctx(node, secrets) as ioctx:
        for name in (f"{claim_object.PREFIX}{other}", f"{CONTENT}{other}"):
            for call in (ioctx.read, ioctx.remove_object):
                with pytest.raises((rados.PermissionError, rados.PermissionDeniedError)):
                    call(name)


async def test_key_of_a_clone_cannot_write_to_its_source(node: RbdNode) -> None:
    source = await node.create("one")
    with node.ceph.ioctx(POOL, node.namespace) as ioctx, rbd.Image(ioctx, source) as image:
        image.write(b"shared", 0)
    clone = await node.create(f"clone-of-{source}", volume=source)
    again = await node.create(f"clone-of-{clone}", volume=clone)
    for volume in (clone, again):
        secrets = of_one_volume(node.ceph, node.namespace, volume)
        await node.stage(volume, secrets)
        await node.publish(volume, secrets)
        with _opened(node, secrets, volume) as image:
            assert image.read(0, 6) == b"shared"
            image.write(b"mine__", 0)
            image.flush()
        with pytest.raises(rbd.PermissionError), _opened(node, secrets, source):
            pass


async def test_user_of_another_namespace_gets_no_image_and_the_reason(node: RbdNode) -> None:
    volume, secrets = await node.create("one"), node.secrets("guest")
    elsewhere = node.ceph.make_namespace()
    name = f"tenant-{elsewhere}"
    foreign = {"userID": name, "userKey": node.ceph.node(name, elsewhere)}
    node.keys["foreign"] = foreign
    await refused(node.stage(volume, foreign), REFUSED, "CephNotPermitted")
    await node.until_connected_as()
    await refused(node.stage(volume, {}), Code.FAILED_PRECONDITION, "CephKeyMissing")
    await refused(node.stage(f"{volume[:17]}{'0' * 40}", secrets), Code.NOT_FOUND)
    await node.stage(volume, secrets)
    await refused(node.publish(volume, foreign), REFUSED, "CephNotPermitted")
    image = _image(node, volume, foreign)
    with pytest.raises(errors.Refused) as caught:
        async with attach.asking(attach.Key(image, foreign["userKey"])) as asked:
            await asked.take(Mode.READERS, HERE, "sandbox-1", "vm-1")
    assert caught.value.error_name == "CephNotPermitted"
    assert name in caught.value.what
    with pytest.raises(rbd.PermissionError), _opened(node, foreign, volume):
        pass
    answer = await node.publish(volume, secrets)
    assert answer.secrets["userKey"] == secrets["userKey"]


def _image(node: RbdNode, volume: str, secrets: dict[str, str]) -> volumes.NetworkImage:
    return volumes.NetworkImage(
        cluster=node.ceph.fsid,
        pool=POOL,
        namespace=node.namespace,
        image=volume,
        monitors=(node.ceph.monitors,),
        user=secrets["userID"],
    )


@contextmanager
def _ioctx(node: RbdNode, secrets: dict[str, str]) -> Iterator[Any]:
    cluster = node.ceph.connected(secrets["userID"], secrets["userKey"])
    try:
        ioctx = cluster.open_ioctx(POOL)
        ioctx.set_namespace(node.namespace)
        try:
            yield ioctx
        finally:
            ioctx.close()
    finally:
        cluster.shutdown()


@contextmanager
def _opened(node: RbdNode, secrets: dict[str, str], volume: str) -> Iterator[Any]:
    with _ioctx(node, secrets) as ioctx, rbd.Image(ioctx, volume) as image:
        yield image


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("pool", ("no pool 'nope'", "ceph osd pool create")),
        ("namespace", ("may not", "ceph auth get")),
        ("user", ("refuses client.nope", "ceph auth get")),
        ("key", ("its key is another one", "ceph auth get-key client.controller-")),
    ],
)
async def test_controller_with_wrong_settings_serves_and_says_what_to_correct(
    ceph: CephCluster, setting: str, words: tuple[str, ...]
) -> None:
    """Its process does not end: an administrator may make what is missing."""
    other = ceph.controller(f"other-{uuid.uuid4().hex[:6]}", ceph.make_namespace())
    wrong = {setting: other if setting == "key" else "nope"}
    with rbd_driver.serving(ceph, **wrong) as driver:
        async with rbd_driver.calling(driver) as co:
            assert not await co.is_ready()
            for call in (co.create("one", WRITERS), co.delete(f"{'0' * 16}-{'1' * 40}")):
                await refused(call, Code.UNAVAILABLE, "[PoolNotOpened]", *words)


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        (
            {"pool": "nope"},
            Code.FAILED_PRECONDITION,
            ("[CephPoolMissing]", "no pool 'nope'", "ceph osd pool create"),
        ),
        ({"namespace": "nope"}, Code.PERMISSION_DENIED, ("[CephNotPermitted]", "ceph auth get")),
        (
            {"monitors": "v2:127.0.0.1:1"},
            Code.UNAVAILABLE,
            ("[CephMonitorsUnreachable]", "127.0.0.1:1"),
        ),
    ],
    ids=["pool", "namespace", "monitors"],
)
async def test_node_with_wrong_settings_refuses_stages_and_ends_present_ones(
    cluster: RbdNode, wrong: dict[str, str], code: grpc.StatusCode, words: tuple[str, ...]
) -> None:
    with tempfile.TemporaryDirectory(prefix="crust-") as name:
        base, top = Path(name), rbd_driver.of_node(name)
        given = {"namespace": cluster.namespace, **wrong}
        text = rbd_driver.settings(cluster.ceph, top=top, **given)
        driver = rbd_driver.driver_of(base, text, mode="node")
        with driver.running():
            async with rbd_driver.calling(driver, waits=True) as co:
                wrongly_set = replace(cluster, co=co, base=base)
                await refused(wrongly_set.stage(), code, *words)
                await wrongly_set.leave()


@pytest.fixture
def small(cluster: RbdNode) -> Iterator[RbdNode]:
    """The pool is over its quota while the test runs, and the manager has told."""
    ceph = cluster.ceph

    def quota(size: int) -> None:
        ceph.command("osd pool set-quota", pool=POOL, field="max_bytes", val=str(size))

    with ceph.ioctx(POOL, cluster.namespace) as ioctx:
        ioctx.write("ballast", bytes(4 << 20))
    try:
        quota(1 << 20)
        _wait_for_flag(ceph, is_full=True)
        yield cluster
    finally:
        quota(0)
        _wait_for_flag(ceph, is_full=False)


def _wait_for_flag(ceph: CephCluster, *, is_full: bool) -> None:
    while True:
        pools = json.loads(ceph.command("osd dump", format="json"))["pools"]
        (flags,) = [pool["flags_names"] for pool in pools if pool["pool_name"] == POOL]
        if ("full_quota" in flags) is is_full:
            ceph.admin.wait_for_latest_osdmap()
            return


async def test_pool_over_its_quota_takes_nothing_new(small: RbdNode) -> None:
    volume_id, full = small.volume, Code.RESOURCE_EXHAUSTED
    while True:  # until then it goes by statistics from before the quota
        if not await small.controller.capacity():
            break
    remedy = ("delete a volume or a snapshot", "enlarge the pool")
    await refused(small.create("new"), full, "[OutOfCapacity]", *remedy)
    await refused(small.grow(), full, "[OutOfCapacity]")
    assert small.images() == [volume_id]
    taken = await small.snapshot()
    await small.stage()
    await small.publish()
    # its image would have to be kept for the snapshot, under another name
    await refused(
        small.delete(volume_id), full, "[CephQuotaReached]", "delete volumes or snapshots"
    )
    assert small.images() == [volume_id]
    await small.controller.delete_snapshot(taken)
    await small.leave()
    assert small.images() == []
