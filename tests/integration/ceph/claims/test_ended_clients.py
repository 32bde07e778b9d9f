"""Clients that ended without closing their image, and nodes that are gone, lose it; the living lose nothing."""

import asyncio
import contextlib
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rados
import rbd

from crust.blockdriver.ceph import claim_object, claims, fencing, omap
from crust.blockdriver.ceph.binding import CephMonitorsUnreachable, CephNotPermitted
from crust.blockdriver.ceph.claim_object import Mode
from crust.blockdriver.ceph.claims import Host
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.provisioning.background import Freeing
from crust.core.volumes import VolumeId
from crust.kubernetes_api.volumes_in_use import TAINT
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph import lossy_path, rbd_driver, rbd_node, rbd_writer
from tests.support.ceph.image_claims import (
    IMAGE,
    LONG_S,
    SIZE,
    A,
    B,
    Bench,
    Client,
    as_admin,
    attached,
    check_cut_off,
    take,
    write,
)
from tests.support.ceph.rbd_driver import RbdDriver
from tests.support.ceph.rbd_writer import Writer
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes

VOLUME = VolumeId(IMAGE)
OWN_ADDRESSES = (
    'allow r, allow command "osd blocklist" with blocklistop=add addr regex '
    r'"^127\.0\.0\.1:0/[1-9][0-9]*$"'
)
"""What docs/security.md gives to a node that may cut off clients of its own host."""


@pytest.fixture
def ended(connection: Connection, namespace: str) -> Freeing:
    """What the controller looks for in the background."""
    return Freeing(Namespace.of(connection, POOL, namespace))


@contextlib.contextmanager
def running(bench: Bench, runtime: Client, vm: str) -> Iterator[Writer]:
    """A hypervisor on node A that has claimed the image and written to it."""
    take(runtime, A, "sandbox-1", vm=vm)
    with rbd_writer.running(bench.ceph, bench.namespace, IMAGE) as hypervisor:
        claims.record(runtime.image, vm)
        yield hypervisor


@pytest.mark.spec("H-53")
@pytest.mark.parametrize("answers_alone", [False, True], ids=["both ways", "answers alone"])
def test_write_of_killed_client_on_its_way_never_lands(
    bench: Bench, ended: Freeing, *, answers_alone: bool
) -> None:
    """The path to the OSD loses packets while the hypervisor writes; it is killed, and the path recovers later."""
    runtime, second = bench.node(), bench.node()
    with (
        running(bench, runtime, "vm-1") as hypervisor,
        lossy_path.cut(hypervisor.process.pid, answers_alone=answers_alone) as path,
    ):
        hypervisor.send(b"STALE" * 4096)
        path.wait_until_sent(5 * 4096)
        hypervisor.kill()
        claims.give_back(runtime.image, "vm-1")
        with pytest.raises(fencing.ImageNotCutOff, match="of sandbox sandbox-1 on node node-a"):
            take(second, B)
        ended.look()
        after, _ = attached(second, B)
        write(after, b"NEW data of node B, synced")
        path.deliver()
    assert after.read(0, 26) == b"NEW data of node B, synced"


@pytest.mark.spec("H-53")
def test_ended_client_alone_is_cut_off(bench: Bench, ended: Freeing) -> None:
    runtime, other = bench.node(), bench.node()
    with running(bench, runtime, "vm-1") as hypervisor:
        other.open()
        [holder] = claim_object.read(runtime.ioctx, IMAGE).claims.holders
        hypervisor.kill()
        claims.give_back(runtime.image, "vm-1")
        after = claim_object.read(runtime.ioctx, IMAGE).claims
        assert (after.holders, after.ended) == ((), (holder,))
        ended.look()
    assert claim_object.read(runtime.ioctx, IMAGE).cookie == ""
    blocklist = bench.blocklist()
    assert blocklist[holder.address] > LONG_S
    assert other.address not in blocklist


def test_client_that_closed_the_image_costs_nothing(bench: Bench) -> None:
    runtime, second = bench.node(), bench.node()
    image, holder = attached(runtime, A)
    image.write(b"x", 0)
    runtime.close()
    before = set(bench.blocklist())
    claims.give_back(runtime.image, holder)
    claims.give_back(runtime.image, holder)
    assert claim_object.read(runtime.ioctx, IMAGE).cookie == ""
    attached(second, B)
    assert set(bench.blocklist()) == before


def test_reader_that_was_killed_is_not_cut_off(bench: Bench) -> None:
    runtime = bench.node()
    holder = take(runtime, A, mode=Mode.READERS)
    runtime.open()
    claims.record(runtime.image, holder.id)
    claims.give_back(runtime.image, holder.id)
    assert claim_object.read(runtime.ioctx, IMAGE).cookie == ""


@pytest.mark.spec("H-53")
def test_client_without_exclusive_lock_never_shows_its_end(bench: Bench) -> None:
    runtime = bench.node()
    with bench.ceph.ioctx(POOL, bench.namespace) as ioctx:
        rbd.RBD().remove(ioctx, IMAGE)
        rbd.RBD().create(ioctx, IMAGE, SIZE, old_format=False, features=rbd.RBD_FEATURE_LAYERING)
    _, holder = attached(runtime, A)
    address = runtime.address
    runtime.close()
    claims.give_back(runtime.image, holder)
    [left] = claim_object.read(runtime.ioctx, IMAGE).claims.ended
    assert left.address == address
    fencing.cut_off(bench.controller().image)
    assert address in bench.blocklist()


@pytest.mark.spec("H-53")
def test_image_with_client_that_ended_is_deleted_after_cut_off(
    bench: Bench, connection: Connection, namespace: str
) -> None:
    from crust.blockdriver.engines.rbd.provisioning import image_use

    runtime = bench.node()
    _, holder = attached(runtime, A)
    claims.give_back(runtime.image, holder)
    place = Namespace.of(connection, POOL, namespace)
    with place.ioctx("cannot test") as ioctx:
        image_use.check_unused(place, ioctx, IMAGE)
    assert runtime.address in bench.blocklist()


# a node whose user may blocklist the clients of its own host


@pytest.fixture
def able(bench: Bench) -> Client:
    name = f"able-{bench.namespace}"
    osd = f"profile rbd pool={POOL} namespace={bench.namespace}"
    return bench.client(name, bench.ceph.user(name, {"mon": OWN_ADDRESSES, "osd": osd}))


@pytest.mark.spec("H-53")
def test_node_that_may_blocklist_itself_frees_its_image(bench: Bench, able: Client) -> None:
    first, second = bench.node(), bench.node()
    image, holder = attached(first, A)
    write(image, b"x")
    claims.give_back(able.image, holder)
    assert bench.blocklist()[first.address] > LONG_S
    check_cut_off(image)
    after, _ = attached(second, B)
    write(after, b"y")


@pytest.mark.parametrize("address", ["127.0.0.1:0/0", "127.0.0.2:0/12345", "10.0.0.1:0/7"])
def test_node_that_may_blocklist_itself_cuts_off_no_other(able: Client, address: str) -> None:
    with pytest.raises(CephNotPermitted):
        able.connection.blocklist([address])


def test_node_without_the_right_cuts_nobody_off(bench: Bench) -> None:
    with pytest.raises(CephNotPermitted):
        bench.node().connection.blocklist(["127.0.0.1:0/12345"])


def silent(client: Client, host: Host) -> None:
    """Attach, and then be no watcher any more: the machine was switched off half a minute ago."""
    image, _ = attached(client, host)
    write(image, b"synced")
    client.close()


@pytest.mark.spec("H-53")
def test_gone_node_is_cut_off_and_the_next_goes_on(bench: Bench, ended: Freeing) -> None:
    first, second = bench.node(), bench.node()
    silent(first, A)
    assert ended.fence([VOLUME], frozenset({A.node})) == frozenset()
    assert bench.blocklist()[first.address] > LONG_S
    after, _ = attached(second, B)
    assert after.read(0, 6) == b"synced"
    with pytest.raises((rbd.Error, rados.Error)):
        first.open().write(b"late__", 0)
    first.images.clear()


@pytest.mark.spec("H-53")
def test_connected_client_of_a_gone_node_is_left(bench: Bench, ended: Freeing) -> None:
    first = bench.node()
    image, _ = attached(first, A)
    assert ended.fence([VOLUME], frozenset({A.node})) == {A.node}
    write(image, b"still mine")
    assert first.address not in bench.blocklist()
    first.close()
    assert ended.fence([VOLUME], frozenset({A.node})) == frozenset()
    assert claim_object.read(bench.controller().ioctx, IMAGE).cookie == ""


@pytest.mark.spec("H-53")
def test_silent_node_keeps_its_claim(bench: Bench, ended: Freeing) -> None:
    first = bench.node()
    silent(first, A)
    assert ended.fence([VOLUME], frozenset({B.node})) == frozenset()
    assert first.address not in bench.blocklist()
    [holder] = claim_object.read(first.ioctx, IMAGE).claims.holders
    assert holder.node == A.node


def test_claim_that_cannot_be_read_stops_no_other(bench: Bench, ended: Freeing) -> None:
    client = bench.node()
    silent(client, A)
    unreadable = {"cookie": b"x", "claims": b'{"schema": 2}'}
    omap.swap(client.ioctx, f"{claim_object.PREFIX}another", None, unreadable)
    assert ended.fence([VolumeId("another"), VOLUME], frozenset({A.node})) == frozenset()
    assert client.address in bench.blocklist()


def test_cluster_that_does_not_answer_ends_the_pass(bench: Bench, ended: Freeing) -> None:
    silent(bench.node(), A)
    with bench.ceph.mon.frozen(), pytest.raises(CephMonitorsUnreachable):
        ended.fence([VOLUME, VolumeId("another")], frozenset({A.node}))


# the driver as a process, and the Kubernetes API


async def until(ask: Callable[[], bool]) -> None:
    """Ask in a thread, again and again, until the answer is yes."""
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(ask):  # noqa: ASYNC110 - nobody else tells
            await asyncio.sleep(0.1)


def metrics_of(driver: RbdDriver) -> str:
    address = re.findall(r"metrics +address=(\S+)", driver.log.read_text())[-1]  # of its last start
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.spec("H-53")
async def test_volumes_of_a_gone_node_are_freed(ceph: CephCluster, tmp_path: Path) -> None:
    namespace, api = ceph.make_namespace(), FakeKubernetes()
    with fake_kubernetes.serving(api, tmp_path) as kubeconfig, contextlib.ExitStack() as stack:
        top = f'metrics_address = "127.0.0.1:0"\nkubernetes.kubeconfig = "{kubeconfig}"\n'
        driver = stack.enter_context(rbd_driver.serving(ceph, within=namespace, top=top))
        ids = [{"name": "block.csi.crust.dev", "nodeID": A.node}]
        api.add_object("csinodes", "node-of-kubernetes", spec={"drivers": ids})
        async with rbd_driver.calling(driver) as co:
            await rbd_driver.ready(co)
            image = (await rbd_node.created(co, "one")).volume_id
        driver.kill()
        claimed = stack.enter_context(as_admin(ceph, namespace, image))
        claims.take(claimed, Mode.WRITER, A, "sandbox-1", "vm-1")
        with pytest.raises(claims.ImageClaimed):
            claims.take(claimed, Mode.WRITER, B, "sandbox-2", "vm-2")
        api.add_object(
            "nodes",
            "node-of-kubernetes",
            spec={"taints": [{"key": TAINT, "effect": "NoExecute"}]},
            status={"conditions": [{"type": "Ready", "status": "Unknown"}]},
        )
        driver.start()
        async with rbd_driver.calling(driver) as co:
            await rbd_driver.ready(co)
            await until(lambda: not claim_object.read(claimed.ioctx, image).claims.holders)
            await until(lambda: "crust_claims_fenced_total 1" in metrics_of(driver))
        assert "was cut off from an image" in driver.log.read_text()
        claims.take(claimed, Mode.WRITER, B, "sandbox-2", "vm-2")
