"""Controller and node as two processes on one Ceph pool: a guest gets the image with the key that a call brought."""

import grpc
import grpc.aio
import pytest

from crust.ceph import claims
from crust.ceph.claim_object import Mode
from crust.rpc.messages import csi
from examples.cluster.ceph_cluster import POOL
from tests.support.ceph.image_claims import as_admin
from tests.support.ceph.rbd_node import SIZE, RbdNode
from tests.support.co import capability
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.timeout(240)

RAW = capability(block=True, mode="SINGLE_NODE_MULTI_WRITER")


async def test_guest_gets_the_image_to_format_with_the_key_of_the_stage(cluster: RbdNode) -> None:
    await cluster.stage()
    answer = csi.deferred_mount(await cluster.publish())
    assert answer.image is not None
    assert answer.image.cluster == cluster.ceph.fsid
    assert (answer.image.pool, answer.image.namespace) == (POOL, cluster.namespace)
    assert answer.image.image in cluster.images()
    assert answer.image.user == cluster.own["userID"]
    assert answer.secrets == {"userKey": cluster.own["userKey"]}
    assert answer.format is not None
    assert answer.capacity_bytes >= SIZE
    await cluster.leave()
    assert cluster.images() == []


async def test_host_is_refused_alike_and_nothing_is_left(cluster: RbdNode) -> None:
    code = grpc.StatusCode.FAILED_PRECONDITION
    await refused(cluster.stage(given=RAW), code, "NoHostDevice")
    await cluster.stage()
    await refused(cluster.publish(deferred=False), code, "NoHostDevice")
    assert not cluster.target().exists()
    await cluster.leave()
    assert cluster.images() == []


async def test_node_answers_the_size_of_the_grown_image(cluster: RbdNode) -> None:
    await cluster.stage()
    await cluster.publish()
    await cluster.grow()
    assert await cluster.expand(size=2 * SIZE) == 2 * SIZE
    await cluster.leave()


async def test_stage_is_refused_while_another_node_has_the_image(cluster: RbdNode) -> None:
    image = cluster.volume
    with as_admin(cluster.ceph, cluster.namespace, image) as claimed:
        there = claims.Host("elsewhere", "another-machine")
        claims.take(claimed, Mode.WRITER, there, "sandbox-1", "vm-1")
        await refused(
            cluster.stage(), grpc.StatusCode.FAILED_PRECONDITION, "ImageClaimed", "elsewhere"
        )
        claims.give_back(claimed, "vm-1")
        here = claims.Host.this("node-of-the-tests")
        claims.take(claimed, Mode.WRITER, here, "sandbox-2", "vm-2")
        await cluster.stage()
        claims.give_back(claimed, "vm-2")
    await cluster.leave()
