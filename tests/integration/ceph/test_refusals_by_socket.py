"""What an administrator has set wrongly, used up or removed: each call's code, error and remedy, by the socket.

And afterwards nothing is half-done: what was refused stands nowhere, and the same call succeeds once its reason is
gone.
"""

import json
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph import rbd_driver
from tests.support.ceph.rbd_node import WRITERS, RbdNode
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.timeout(240)

Code = grpc.StatusCode


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
        (
            {"namespace": "nope"},
            Code.PERMISSION_DENIED,
            ("[CephNotPermitted]", "ceph auth get"),
        ),
        (
            {"monitors": "v2:127.0.0.1:1"},
            Code.UNAVAILABLE,
            ("[CephMonitorsUnreachable]", "127.0.0.1:1"),
        ),
    ],
    ids=["pool", "namespace", "monitors"],
)
async def test_node_with_wrong_settings_refuses_the_stage_and_ends_what_there_is(
    cluster: RbdNode, wrong: dict[str, str], code: grpc.StatusCode, words: tuple[str, ...]
) -> None:
    with tempfile.TemporaryDirectory(prefix="crust-") as name:
        base, top = Path(name), rbd_driver.of_node(name)
        given = {"namespace": cluster.namespace, **wrong}
        text = rbd_driver.settings(cluster.ceph, top=top, **given)
        driver = rbd_driver.driver_of(base, text, mode="node")
        with driver.running():
            async with rbd_driver.calling(driver, waits=True) as co:
                there = replace(cluster, co=co, base=base)
                await refused(there.stage(), code, *words)
                await there.leave()


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
        found = json.loads(ceph.command("osd dump", format="json"))["pools"]
        (flags,) = [each["flags_names"] for each in found if each["pool_name"] == POOL]
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
