"""Users that may use one namespace, or one volume: what else there is, they cannot read, and the error says so."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import rados
import rbd

from crust.ceph import attach, caps, claim_object
from crust.ceph.claim_object import Mode
from crust.ceph.claims import Host
from crust.core import errors, volumes
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph.rbd_node import RbdNode
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.timeout(240)

REFUSED = grpc.StatusCode.PERMISSION_DENIED
HERE = Host("node-of-the-tests", "machine")


def of_one_volume(ceph: CephCluster, namespace: str, volume: str) -> dict[str, str]:
    """The secrets of a user for one volume, as `crust ceph caps` makes it."""
    with ceph.ioctx(POOL, namespace) as ioctx:
        found = caps.of_volume(ioctx, POOL, namespace, volume)
    name = f"volume-{uuid.uuid4().hex[:8]}"
    return {"userID": name, "userKey": ceph.user(name, {"mon": caps.MONITORS, "osd": found})}


async def test_key_of_one_volume_stages_and_publishes_that_one_and_no_other(node: RbdNode) -> None:
    mine, other = await node.create("one"), await node.create("two")
    secrets = of_one_volume(node.ceph, node.namespace, mine)
    await node.stage(mine, secrets)
    answer = await node.publish(mine, secrets)
    assert answer.secrets["userKey"] == secrets["userKey"]
    await refused(node.stage(other, secrets), REFUSED, "CephNotPermitted")
    await node.unpublish(mine)
    await node.unstage(mine)
    assert node.notes() == []


async def test_key_of_one_volume_opens_that_image_for_a_guest_and_no_other(node: RbdNode) -> None:
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
        for name in (f"{claim_object.PREFIX}{other}", f"{caps.CONTENT}{other}"):
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


async def test_user_of_another_namespace_gets_no_image_and_the_error_says_so(node: RbdNode) -> None:
    volume, secrets = await node.create("one"), node.secrets("guest")
    await node.stage(volume, secrets)
    elsewhere = node.ceph.make_namespace()
    name = f"tenant-{elsewhere}"
    foreign = {"userID": name, "userKey": node.ceph.node(name, elsewhere)}
    node.keys["foreign"] = foreign
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
