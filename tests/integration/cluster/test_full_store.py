"""An etcd that has reached its quota: nothing is half-done, nobody is lost, and all goes on once it is disarmed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from crust.cluster.etcd import examination
from crust.cluster.etcd.client.failures import StoreFull
from examples.cluster import etcd as members
from examples.cluster.etcd import Etcd
from tests.integration.cluster.test_central import NODES, Nodes, controller
from tests.support.cluster.central_cluster import refused
from tests.support.cluster.cluster_contract import eventually

QUOTA = 4 << 20
LATE = NODES[-1]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """A member whose database may have 4 MiB."""
    options = [f"--quota-backend-bytes={QUOTA}"]
    with members.running(tmp_path, nodes=NODES, options=options) as etcd:
        yield etcd


@pytest.fixture
async def nodes(etcd: Etcd) -> AsyncIterator[Nodes]:
    """Two connected nodes; the third one joins later."""
    nodes = Nodes(etcd)
    await nodes.join(*NODES[:-1])
    try:
        yield nodes
    finally:
        await nodes.leave(*NODES)


def fill(etcd: Etcd) -> None:
    """Write until etcd refuses, as one does that is never compacted."""
    with pytest.raises(AssertionError, match="database space exceeded"):
        write(etcd, QUOTA)


def write(etcd: Etcd, size: int) -> None:
    """Write so many bytes, in parts, to one key."""
    for _ in range(size >> 16):
        etcd.ctl("put", "/filler", "x" * (64 << 10))


def make_space(etcd: Etcd) -> None:
    """As docs/etcd.md says."""
    revision = etcd.ctl("get", "--prefix", "--limit=1", "--write-out=fields", "/")
    at = next(line for line in revision.splitlines() if line.startswith('"Revision"'))
    etcd.ctl("compact", at.split()[-1])
    etcd.ctl("defrag")
    etcd.ctl("alarm", "disarm")


def left_s(etcd: Etcd, lease: str) -> int:
    """The seconds that a lease has left: "lease 1 granted with TTL(5s), remaining(4s)"."""
    said = etcd.ctl("lease", "timetolive", lease)
    return int(said.partition("remaining(")[2].partition("s)")[0])


def renewals(etcd: Etcd) -> Iterator[bool]:
    """Whether every lease was renewed since the one before, which shows as a rise of what it has left."""
    leases = etcd.ctl("lease", "list").split()[-3:]
    before = {each: left_s(etcd, each) for each in leases}
    risen: set[str] = set()
    while True:
        now = {each: left_s(etcd, each) for each in leases}
        risen |= {each for each in leases if now[each] > before[each]}
        before = now
        yield len(risen) == len(leases)


async def renewed(etcd: Etcd) -> None:
    """Wait until the leases of the controller and both nodes were renewed."""
    found = renewals(etcd)
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(next, found):
            """A call to etcd takes its time."""


async def refused_as_full(call: object) -> None:
    """The call ends so that a sidecar repeats it, and the operator knows what to do."""
    async with refused(grpc.StatusCode.UNAVAILABLE) as found:
        await call  # type: ignore[misc]
    said = found[0].details() or ""
    assert "[StoreFull]" in said
    assert "disarm the alarm: docs/etcd.md" in said


async def test_calls_are_refused_and_repeated_ones_succeed_when_there_is_space_again(
    etcd: Etcd, nodes: Nodes
) -> None:
    connected = NODES[:-1]
    async with controller(nodes, *connected) as sidecar:
        volume = await sidecar.create("before")
        await asyncio.to_thread(fill, etcd)
        await refused_as_full(sidecar.create("pvc"))
        await refused_as_full(sidecar.delete(volume.volume_id))
        assert nodes.homes("pvc") == []
        assert len(nodes.homes("before")) == 1
        await renewed(etcd)
        assert set(sidecar.central.router.store.nodes()) == set(connected)
        await asyncio.to_thread(make_space, etcd)
        await sidecar.create("pvc")
        await sidecar.delete(volume.volume_id)
        assert [len(nodes.homes(name)) for name in ("pvc", "before")] == [1, 0]


def said_full(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether a node has logged that, and why, it is not announced."""
    reasons = [getattr(each, "error", None) for each in caplog.records]
    return any(isinstance(each, StoreFull) for each in reasons)


async def test_node_that_joins_a_full_store_is_known_when_there_is_space_again(
    etcd: Etcd, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """A lease is a write, too: etcd grants none."""
    async with controller(nodes, *NODES[:-1]) as sidecar:
        await asyncio.to_thread(fill, etcd)
        joining = asyncio.create_task(nodes.join(LATE))
        await eventually(lambda: said_full(caplog))
        await asyncio.to_thread(make_space, etcd)
        await asyncio.wait_for(joining, 60)
        await eventually(lambda: LATE in sidecar.central.router.store.nodes())
        await sidecar.create("pvc", LATE)
        assert nodes.homes("pvc") == [LATE]


async def test_doctor_names_the_alarm(etcd: Etcd) -> None:
    await asyncio.to_thread(fill, etcd)
    seen = await examination.examine(etcd.settings("controller"), NODES[0])
    assert ["NOSPACE" in "".join(each.alarms) for each in seen.members] == [True]
