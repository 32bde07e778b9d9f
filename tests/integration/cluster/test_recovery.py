"""What is lost with etcd's data, its history or its rules, and how nodes and controllers come back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from crust.cluster import retirement
from crust.cluster.etcd import connect
from crust.cluster.etcd.client import failures, writes
from crust.cluster.etcd.client.watches import Changes, Follower, Listing
from crust.cluster.etcd.keys import Keys
from crust.cluster.etcd.node_side import EtcdNodeSide
from crust.cluster.protocol import Answer, LeadershipLost, StoreUnavailable
from examples.cluster import etcd as members
from examples.cluster.etcd import PREFIX, Etcd
from tests.support.cluster.cluster_contract import WAIT_S, announcement, eventually, request
from tests.support.cluster.etcd_cluster import EtcdCluster

NODES = ("n1", "n2")
KEYS = Keys(PREFIX)


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Etcd]:
    """A member for one test, which destroys it."""
    with members.running(tmp_path, nodes=NODES) as etcd:
        yield etcd


@pytest.fixture
async def own_cluster(own_etcd: Etcd) -> AsyncIterator[EtcdCluster]:
    """Connections to it."""
    async with AsyncExitStack() as stack:
        yield EtcdCluster(own_etcd, stack)


@contextlib.asynccontextmanager
async def echoing(*nodes: EtcdNodeSide) -> AsyncIterator[None]:
    """Nodes that answer each request with its message."""

    async def serve(node: EtcdNodeSide) -> None:
        async for each in node.requests():
            with contextlib.suppress(StoreUnavailable):
                await node.answer(each, Answer(0, "", each.message))

    serving = [asyncio.create_task(serve(node)) for node in nodes]
    try:
        yield
    finally:
        for each in serving:
            each.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def test_wiped_etcd_is_filled_again_by_the_nodes(
    own_etcd: Etcd, own_cluster: EtcdCluster
) -> None:
    """The new etcd has the name, the addresses and the cluster's id of the old one, and has passed its revision."""
    controller = await own_cluster.controller()
    nodes = [await own_cluster.node(name) for name in NODES]
    for name, node in zip(NODES, nodes, strict=True):
        await node.announce(announcement(name))
    async with controller.lead("c") as term:
        await eventually(lambda: set(controller.nodes()) == set(NODES))
        own_etcd.wipe()
        await asyncio.to_thread(own_etcd.wait_ready)
        await asyncio.to_thread(own_etcd.protect, *NODES)
        for number in range(100):
            own_etcd.ctl("put", "/other", str(number))
        await asyncio.wait_for(term.lost(), WAIT_S)
        with pytest.raises(LeadershipLost):
            await controller.place("volume-1", "a")
    async with controller.lead("c"), echoing(*nodes):
        await eventually(lambda: set(controller.nodes()) == set(NODES))
        assert controller.known_pools() == {f"pool-of-{name}": name for name in NODES}
        answer = await controller.ask("n2", request(1, b"after"), WAIT_S)
        assert answer.response == b"after"


async def test_watch_whose_revision_was_compacted_lists_again(
    etcd: Etcd, cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compaction falls between a listing and its watch."""
    listing = writes.listing
    asked: list[int] = []

    async def compacted_meanwhile(*args: object, **kwargs: object) -> object:
        found = await listing(*args, **kwargs)  # type: ignore[arg-type]
        if not asked:
            for _ in range(3):
                etcd.ctl("put", KEYS.announce("n1").decode(), "x")
            revision = found[0] + 3
            await asyncio.to_thread(etcd.ctl, "compact", str(revision))
        asked.append(found[0])
        return found

    monkeypatch.setattr(writes, "listing", compacted_meanwhile)
    async with connect.client(etcd.settings("controller")) as client:
        follower = Follower(client, *KEYS.node("n1"), what="the test")
        async with contextlib.aclosing(follower.follow()) as following, asyncio.timeout(WAIT_S):
            first = await anext(following)
            assert isinstance(first, Listing)
            if not first.kvs:  # the watch was created before it was refused
                first = await anext(following)
            assert isinstance(first, Listing)
            assert [kv.value for kv in first.kvs] == [b"x"]
            assert len(asked) == 2
            etcd.ctl("put", KEYS.announce("n1").decode(), "y")
            changed = await anext(following)
            assert isinstance(changed, Changes)
            assert [event.kv.value for event in changed.events] == [b"y"]


@pytest.mark.parametrize("back", ["n1", "n2"])
async def test_node_or_disk_that_comes_back_between_look_and_write_is_not_retired(
    etcd: Etcd, cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch, back: str
) -> None:
    operator = await cluster.controller()
    await (await cluster.node("n1")).announce(announcement("n1", "a"))
    await cluster.leave("n1")

    async def comes_back() -> None:
        await (await cluster.node(back)).announce(announcement(back, "a"))

    looks = _interleaved(monkeypatch, comes_back)
    # a disk that was moved is known as the other node's, and n1 has no pool any more
    with pytest.raises((retirement.NodeStillConnected, retirement.NoSuchClusterNode)):
        await operator.retire("n1")
    assert len(looks) == 2
    keys = etcd.keys()
    assert [key for key in keys if "decommissioned" in key] == []


async def test_node_is_retired_though_another_one_announces_itself_meanwhile(
    etcd: Etcd, cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = await cluster.controller()
    await (await cluster.node("n1")).announce(announcement("n1", "a"))
    await cluster.leave("n1")

    async def another() -> None:
        await (await cluster.node("n2")).announce(announcement("n2", "b"))

    looks = _interleaved(monkeypatch, another)
    assert await operator.retire("n1") == ("a",)
    assert len(looks) == 2
    keys = etcd.keys()
    assert [key for key in keys if "decommissioned" in key] == ["/crust/decommissioned/a"]


def _interleaved(
    monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], Awaitable[None]]
) -> list[int]:
    """Let `meanwhile` happen after the first look of a retirement; returns the looks."""
    listing = writes.listing
    looks: list[int] = []

    async def looked(*args: Any, **kwargs: Any) -> Any:
        found = await listing(*args, **kwargs)
        if args[1:] == KEYS.followed() and "retired" in kwargs["what"]:
            looks.append(found[0])
            if len(looks) == 1:
                await meanwhile()
        return found

    monkeypatch.setattr(writes, "listing", looked)
    return looks


async def test_denied_watch_is_reported_and_works_once_access_is_granted(
    own_etcd: Etcd, own_cluster: EtcdCluster, caplog: pytest.LogCaptureFixture
) -> None:
    controller = await own_cluster.controller()
    own_etcd.grant("n3", f"{PREFIX}nodes/other/")
    node = await own_cluster.node("n3")
    async with controller.lead("c"), echoing(node):
        asked = asyncio.create_task(controller.ask("n3", request(1, b"m"), WAIT_S))
        await eventually(lambda: "StoreAccessDenied" in str([r.__dict__ for r in caplog.records]))
        own_etcd.ctl(
            "role", "grant-permission", "n3", "--prefix=true", "readwrite", f"{PREFIX}nodes/n3/"
        )
        assert (await asked).response == b"m"


async def test_changes_of_roles_lose_no_request(own_etcd: Etcd, own_cluster: EtcdCluster) -> None:
    """etcd fails calls that are under way while a role changes."""
    controller, node = await own_cluster.controller(), await own_cluster.node("n1")
    done = asyncio.Event()

    async def change_roles() -> None:
        for number in range(12):
            await asyncio.to_thread(own_etcd.ctl, "role", "add", f"r{number}")
        done.set()

    async with controller.lead("c"), echoing(node):
        changing = asyncio.create_task(change_roles())
        number = 0
        while not done.is_set():
            number += 1
            asks = (
                controller.ask("n1", request(number * 100 + i, b"m"), WAIT_S) for i in range(16)
            )
            assert {each.response for each in await asyncio.gather(*asks)} == {b"m"}
        await changing


async def test_announcement_whose_lease_was_revoked_is_made_again(
    etcd: Etcd, cluster: EtcdCluster
) -> None:
    """Any certificate may revoke leases in etcd 3.4; so does a node that was cut off for longer than its lease."""
    controller, node = await cluster.controller(), await cluster.node("n1")
    await node.announce(announcement("n1"))
    await eventually(lambda: "n1" in controller.nodes())
    seen = asyncio.create_task(eventually(lambda: "n1" not in controller.nodes()))
    await asyncio.sleep(0)
    for lease in etcd.ctl("lease", "list").split()[3:]:
        etcd.ctl("lease", "revoke", lease)
    await seen
    await eventually(lambda: "n1" in controller.nodes())


async def test_deposed_leader_writes_nothing_also_with_a_wrong_clock(
    etcd: Etcd, cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears nothing of the other one, and its lease has time; only etcd knows."""
    first, second = await cluster.controller("c1"), await cluster.controller("c2")
    async with first.lead("c1") as old:
        monkeypatch.setattr(first._mirror, "see", lambda _: None)
        etcd.ctl("del", KEYS.leader.decode())
        async with second.lead("c2"):
            assert old.is_held
            with pytest.raises(LeadershipLost):
                await first.place("v", "a")
            assert not old.is_held
            assert await second.placement("v") == ""


async def test_late_duplicate_of_a_removal_leaves_the_next_placement(
    cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd carries out a removal that timed out after the same name was placed in the same pool again."""
    controller = await cluster.controller()
    commit, sent = writes.commit, []

    async def kept(*given: Any, **named: Any) -> Any:
        sent.append((given, named))
        return await commit(*given, **named)

    async with controller.lead("c"):
        await controller.place("v", "a")
        monkeypatch.setattr(writes, "commit", kept)
        await controller.unplace("v", "a")
        assert await controller.placement("v") == ""
        monkeypatch.undo()
        await controller.place("v", "a")
        for given, named in sent:
            await commit(*given, **named)
        assert await controller.placement("v") == "a"


async def test_leader_learns_that_another_one_leads(etcd: Etcd, cluster: EtcdCluster) -> None:
    first, second = await cluster.controller("c1"), await cluster.controller("c2")
    async with first.lead("c1") as old:
        waiting = asyncio.create_task(first.ask("n1", request(), WAIT_S))
        await eventually(lambda: KEYS.request("n1", "request-1").decode() in set(etcd.keys()))
        etcd.ctl("del", KEYS.leader.decode())
        async with second.lead("c2"):
            await asyncio.wait_for(old.lost(), WAIT_S)
            with pytest.raises(LeadershipLost):
                await waiting


async def test_requests_and_answers_leave_nothing_behind(etcd: Etcd, cluster: EtcdCluster) -> None:
    controller, node = await cluster.controller(), await cluster.node("n1")
    async with controller.lead("c"), echoing(node):
        for _ in range(
            3
        ):  # the same ids again: an answer that was read is no answer to the next one
            asks = (controller.ask("n1", request(i, str(i).encode()), WAIT_S) for i in range(64))
            got = await asyncio.gather(*asks)
            assert [each.response for each in got] == [str(i).encode() for i in range(64)]
        await eventually(lambda: etcd.keys() == [KEYS.leader.decode()])
        await controller.ask("n1", request(1, b"last"), WAIT_S)
    assert etcd.keys() == []


async def test_request_that_is_too_large_is_refused_and_not_repeated(
    etcd: Etcd, cluster: EtcdCluster
) -> None:
    """etcd and its gRPC server have limits of their own, and other words for them."""
    controller = await cluster.controller()
    async with controller.lead("c"):
        for size in (1_200_000, 1_700_000):
            with pytest.raises(failures.StoreRequestRefused, match="the request is too large"):
                await controller.ask("n1", request(1, b"x" * size), WAIT_S)


async def test_full_store_is_named_and_what_to_do(own_etcd: Etcd, own_cluster: EtcdCluster) -> None:
    node = await own_cluster.node("n1")
    await node.announce(announcement("n1"))
    own_etcd.raise_no_space()
    with pytest.raises(failures.StoreFull, match="compact and defragment"):
        await node.announce(announcement("n1"))
    controller = await own_cluster.controller()
    async with contextlib.AsyncExitStack() as leads:
        leading = asyncio.create_task(leads.enter_async_context(controller.lead("c")))
        await eventually(lambda: isinstance(controller.problem(), failures.StoreFull))
        own_etcd.ctl("alarm", "disarm")
        await node.announce(announcement("n1"))
        await asyncio.wait_for(leading, WAIT_S)
        assert controller.problem() is None
