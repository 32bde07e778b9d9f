"""Three members, of which some are killed, hang, or are too few."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from crust.cluster.etcd import examination
from crust.cluster.etcd.client import failures
from crust.cluster.protocol import StoreUnavailable
from examples.cluster import etcd as members
from examples.cluster.etcd import Etcd, Member
from tests.integration.cluster.test_recovery import echoing
from tests.support.cluster.cluster_contract import WAIT_S, announcement, eventually, request
from tests.support.cluster.etcd_cluster import EtcdCluster


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """Three members, whatever the test before did to them."""
    with members.running(tmp_path_factory.mktemp("etcd3"), 3, nodes=("n1",)) as etcd:
        yield etcd


@pytest.fixture
async def cluster(three: Etcd) -> AsyncIterator[EtcdCluster]:
    """Connections to all three."""
    three.empty()
    async with AsyncExitStack() as stack:
        yield EtcdCluster(three, stack)


def leader_of(etcd: Etcd) -> Member:
    """The member that leads the others."""
    lines = etcd.ctl("endpoint", "status").splitlines()
    (line,) = (each for each in lines if each.split(", ")[4] == "true")
    return next(each for each in etcd.members if each.address in line)


async def test_without_quorum_calls_say_so_and_go_on_when_it_is_back(
    three: Etcd, cluster: EtcdCluster
) -> None:
    controller, node = await cluster.controller(), await cluster.node("n1")
    await node.announce(announcement("n1"))
    await eventually(lambda: "n1" in controller.nodes())
    dead = three.members[:2]
    for each in dead:
        each.kill()
    with pytest.raises(failures.StoreWithoutQuorum):
        await node.announce(announcement("n1", capacity_bytes=5))
    with pytest.raises(StoreUnavailable):
        await controller.placement("volume-1")
    assert "n1" in controller.nodes()
    await eventually(lambda: isinstance(controller.problem(), failures.StoreWithoutQuorum))
    for each in dead:
        three.restart(each)
    for each in dead:
        await asyncio.to_thread(each.wait_ready)
    await eventually(lambda: controller.nodes()["n1"].capacity_bytes == 5)
    assert controller.problem() is None


def first_of(etcd: Etcd) -> Member:
    """The member that clients use first."""
    return etcd.members[0]


@pytest.mark.parametrize("fault", ["kill", "pause"])
@pytest.mark.parametrize("choose", [leader_of, first_of])
async def test_requests_go_on_when_a_member_is_lost(
    three: Etcd, cluster: EtcdCluster, fault: str, choose: Callable[[Etcd], Member]
) -> None:
    """A paused member keeps its connections open and is silent: watches and leases must leave it by themselves."""
    controller, node = await cluster.controller(), await cluster.node("n1")
    await node.announce(announcement("n1"))
    async with echoing(node), controller.lead("c") as term:
        await controller.ask("n1", request(1), WAIT_S)
        lost = await asyncio.to_thread(choose, three)
        getattr(lost, fault)()
        try:
            assert (await controller.ask("n1", request(2, b"2"), 60)).response == b"2"
            assert term.is_held
        finally:
            if fault == "kill":
                three.restart(lost)
                await asyncio.to_thread(lost.wait_ready)
            else:
                lost.go_on()
        assert (await controller.ask("n1", request(3, b"3"), 60)).response == b"3"


async def test_requests_go_on_while_a_lost_member_is_replaced(tmp_path: Path) -> None:
    """By one with another name and address, which the settings of running programs do not have."""
    with members.running(tmp_path, 3, nodes=("n1",)) as etcd:
        async with AsyncExitStack() as stack:
            cluster = EtcdCluster(etcd, stack)
            controller, node = await cluster.controller(), await cluster.node("n1")
            await node.announce(announcement("n1"))
            async with echoing(node), controller.lead("c") as term:
                await replace_first(etcd)
                assert (await controller.ask("n1", request(1, b"1"), 60)).response == b"1"
                etcd.members[0].kill()  # of those that they know, one is left
                assert (await controller.ask("n1", request(2, b"2"), 60)).response == b"2"
                assert term.is_held
            seen = await examination.examine(etcd.settings("controller"), "n1")
            assert [each.knows_leader for each in seen.members] == [False, True, True]


async def replace_first(etcd: Etcd) -> None:
    """As docs/etcd.md says: remove the lost member, add the new one, start it with an empty directory."""
    lost = etcd.members.pop(0)
    lost.kill()
    async with asyncio.timeout(WAIT_S):
        while not await asyncio.to_thread(is_done, etcd, "get", "/"):
            """The lost one may have led the others."""
    listed = (await asyncio.to_thread(etcd.ctl, "member", "list")).splitlines()
    (number,) = (line.split(", ")[0] for line in listed if line.split(", ")[2] == lost.name)
    await asyncio.to_thread(etcd.ctl, "member", "remove", number)
    new = etcd.new_member("m3")
    add = ("member", "add", new.name, f"--peer-urls={new.peer_url}")
    async with asyncio.timeout(WAIT_S):
        while not await asyncio.to_thread(is_done, etcd, *add):
            """etcd takes no member before the others have been connected for some seconds."""
    new.options.append("--initial-cluster-state=existing")
    etcd.members.append(new)
    etcd.restart(new)
    await asyncio.to_thread(new.wait_ready)


def is_done(etcd: Etcd, *arguments: str) -> bool:
    """Whether etcdctl succeeds."""
    with contextlib.suppress(AssertionError):
        etcd.ctl(*arguments)
        return True
    return False
