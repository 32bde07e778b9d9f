"""Nodes that the cluster has declared gone lose their images in a real Ceph cluster; the living lose nothing."""

import asyncio
import contextlib
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import rados
import rbd

from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.provisioning.freeing import Freeing
from crust.ceph import claim_object, claims, omap
from crust.ceph.claim_object import Mode
from crust.ceph.claims import Host
from crust.ceph.connection import Connection
from crust.ceph.failures import CephMonitorsUnreachable
from crust.core.volumes import VolumeId
from crust.kubernetes_api.volumes_in_use import TAINT
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph import rbd_driver, rbd_node
from tests.support.ceph.image_claims import (
    IMAGE,
    LONG_S,
    A,
    B,
    Bench,
    Client,
    as_admin,
    attached,
)
from tests.support.ceph.rbd_driver import RbdDriver
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes

VOLUME = VolumeId(IMAGE)
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def fencing(connection: Connection, namespace: str) -> Freeing:
    return Freeing(Place.of(connection, POOL, namespace))


def silent(client: Client, host: Host) -> None:
    """Attach, and then be no watcher any more: the machine was switched off half a minute ago."""
    image, _ = attached(client, host)
    image.write(b"synced", 0)
    image.flush()
    image.close()
    client.images.clear()


def check_writes_nothing(client: Client) -> None:
    with pytest.raises((rbd.Error, rados.Error)):
        client.open().write(b"late__", 0)
    client.images.clear()


@pytest.mark.spec("H-53")
def test_gone_node_is_cut_off_and_the_next_goes_on(bench: Bench, fencing: Freeing) -> None:
    first, second = bench.node(), bench.node()
    silent(first, A)
    assert fencing.fence([VOLUME], frozenset({A.node})) == frozenset()
    assert bench.blocklist()[first.address] > LONG_S
    after, _ = attached(second, B)
    assert after.read(0, 6) == b"synced"
    check_writes_nothing(first)


@pytest.mark.spec("H-53")
def test_connected_client_of_a_gone_node_is_left(bench: Bench, fencing: Freeing) -> None:
    first = bench.node()
    image, _ = attached(first, A)
    assert fencing.fence([VOLUME], frozenset({A.node})) == {A.node}
    image.write(b"still mine", 0)
    image.flush()
    assert first.address not in bench.blocklist()
    image.close()
    first.images.clear()
    assert fencing.fence([VOLUME], frozenset({A.node})) == frozenset()
    assert claim_object.read(bench.controller().ioctx, IMAGE).cookie == ""


@pytest.mark.spec("H-53")
def test_silent_node_keeps_its_claim(bench: Bench, fencing: Freeing) -> None:
    first = bench.node()
    silent(first, A)
    assert fencing.fence([VOLUME], frozenset({B.node})) == frozenset()
    assert first.address not in bench.blocklist()
    [holder] = claim_object.read(first.ioctx, IMAGE).claims.holders
    assert holder.node == A.node


def test_claim_that_cannot_be_read_stops_no_other(bench: Bench, fencing: Freeing) -> None:
    client = bench.node()
    silent(client, A)
    unreadable = {"cookie": b"x", "claims": b'{"schema": 2}'}
    omap.swap(client.ioctx, f"{claim_object.PREFIX}another", None, unreadable)
    assert fencing.fence([VolumeId("another"), VOLUME], frozenset({A.node})) == frozenset()
    assert client.address in bench.blocklist()


def test_cluster_that_does_not_answer_ends_the_pass(bench: Bench, fencing: Freeing) -> None:
    silent(bench.node(), A)
    with bench.ceph.mon.frozen(), pytest.raises(CephMonitorsUnreachable):
        fencing.fence([VOLUME, VolumeId("another")], frozenset({A.node}))


# the driver as a process, and the Kubernetes API


def tainted(api: FakeKubernetes, name: str, *, ready: str) -> None:
    api.add_object(
        "nodes",
        name,
        spec={"taints": [{"key": TAINT, "effect": "NoExecute"}]},
        status={"conditions": [{"type": "Ready", "status": ready}]},
    )


async def until_free(ioctx: Any, image: str) -> None:
    async with asyncio.timeout(120):
        while True:
            found = await asyncio.to_thread(claim_object.read, ioctx, image)
            if not found.claims.holders:
                return
            await asyncio.sleep(0.1)


async def fenced_is_counted(driver: RbdDriver) -> None:
    """The claim is free before it is counted."""
    address = re.findall(r"metrics +address=(\S+)", driver.log.read_text())[-1]  # of its last start
    async with asyncio.timeout(60):
        while True:
            if "crust_claims_fenced_total 1" in await asyncio.to_thread(metrics_at, address):
                return
            await asyncio.sleep(0.1)


def metrics_at(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        found: str = answer.read().decode()
        return found


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
        there = stack.enter_context(as_admin(ceph, namespace, image))
        claims.take(there, Mode.WRITER, A, "sandbox-1", "vm-1")
        with pytest.raises(claims.ImageClaimed):
            claims.take(there, Mode.WRITER, B, "sandbox-2", "vm-2")
        tainted(api, "node-of-kubernetes", ready="Unknown")
        driver.start()
        async with rbd_driver.calling(driver) as co:
            await rbd_driver.ready(co)
            await until_free(there.ioctx, image)
            await fenced_is_counted(driver)
        assert "was cut off from an image" in driver.log.read_text()
        claims.take(there, Mode.WRITER, B, "sandbox-2", "vm-2")
