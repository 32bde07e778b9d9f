"""What an administrator has set wrongly, used up or removed: each call's code, error and remedy, by the socket.

And afterwards nothing is half-done: what was refused stands nowhere, and the same call succeeds once its reason is
gone.
"""

import json
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph import rbd_driver
from tests.support.ceph.rbd_driver import RbdDriver
from tests.support.ceph.rbd_node import WRITERS, RbdNode
from tests.support.co import Co
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.timeout(240)

Code = grpc.StatusCode


@asynccontextmanager
async def controller(
    ceph: CephCluster, *changes: tuple[str, str], key: str = ""
) -> AsyncIterator[grpc.aio.Channel]:
    """A controller whose settings are changed."""
    namespace = ceph.make_namespace()
    user = f"controller-{namespace}"
    right = ceph.controller(user, namespace)
    with tempfile.TemporaryDirectory(prefix="crust-") as name:
        base = Path(name)
        config = rbd_driver.write_config(base, ceph, user, key or right, namespace)
        text = config.read_text()
        for before, after in changes:
            before = before.format(namespace=namespace, user=user)
            assert before in text
            text = text.replace(before, after)
        config.write_text(text)
        driver = RbdDriver(base, config)
        with driver.running():
            async with channel.connect(str(driver.socket)) as connected:
                await connected.channel_ready()
                yield connected


async def probe(connected: grpc.aio.Channel) -> Any:
    return await csi_pb2_grpc.IdentityStub(connected).Probe(csi_pb2.ProbeRequest(), timeout=60)


async def delete(connected: grpc.aio.Channel) -> Any:
    return await Co(connected).delete(f"{'0' * 16}-{'1' * 40}")


async def create(connected: grpc.aio.Channel) -> Any:
    return await Co(connected).create("one", WRITERS)


@pytest.mark.parametrize(
    ("changes", "has_key", "words"),
    [
        ([(f'pool = "{POOL}"', 'pool = "nope"')], True, ("no pool 'nope'", "ceph osd pool create")),
        ([('namespace = "{namespace}"', 'namespace = "nope"')], True, ("may not", "ceph auth get")),
        (
            [('user = "{user}"', 'user = "nobody"')],
            True,
            ("refuses client.nobody", "ceph auth get"),
        ),
        ([], False, ("its key is another one", "ceph auth get-key client.controller-")),
    ],
    ids=["pool", "namespace", "user", "key"],
)
async def test_controller_with_wrong_settings_serves_and_says_what_to_correct(
    ceph: CephCluster, changes: list[tuple[str, str]], words: tuple[str, ...], *, has_key: bool
) -> None:
    """Its process does not end: an administrator may make what is missing."""
    key = "" if has_key else ceph.controller(f"other-{uuid.uuid4().hex[:6]}", ceph.make_namespace())
    async with controller(ceph, *changes, key=key) as connected:
        assert not (await probe(connected)).ready.value
        for call in (create, delete):
            await refused(call(connected), Code.UNAVAILABLE, "[PoolNotOpened]", *words)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (
            (f'pool = "{POOL}"', 'pool = "nope"'),
            Code.FAILED_PRECONDITION,
            ("[CephPoolMissing]", "no pool 'nope'", "ceph osd pool create"),
        ),
        (
            ('namespace = "{namespace}"', 'namespace = "nope"'),
            Code.PERMISSION_DENIED,
            ("[CephNotPermitted]", "ceph auth get"),
        ),
        (
            ('monitors = "{monitors}"', 'monitors = "v2:127.0.0.1:1"'),
            Code.UNAVAILABLE,
            ("[CephMonitorsUnreachable]", "127.0.0.1:1"),
        ),
    ],
    ids=["pool", "namespace", "monitors"],
)
async def test_node_with_wrong_settings_refuses_the_stage_and_ends_what_there_is(
    cluster: RbdNode, change: tuple[str, str], code: grpc.StatusCode, words: tuple[str, ...]
) -> None:
    before, after = change
    before = before.format(namespace=cluster.namespace, monitors=cluster.ceph.monitors)
    with tempfile.TemporaryDirectory(prefix="crust-") as name:
        base = Path(name)
        config = rbd_driver.write_config_without_key(base, cluster.ceph, cluster.namespace)
        text = config.read_text()
        assert before in text
        config.write_text(text.replace(before, after))
        driver = RbdDriver(base, config, mode="node")
        with driver.running():
            async with channel.connect(str(driver.socket)) as connected:
                there = replace(cluster, co=Co(connected, waits=True), base=base)
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
