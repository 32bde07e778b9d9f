"""Certificates that a member refuses: the error says why, and a new file is enough to go on."""

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from crust.cluster.etcd import connect
from crust.cluster.etcd.client import failures, writes
from crust.cluster.etcd.client.certificates import Files
from crust.cluster.etcd.client.channels import Channels
from crust.cluster.etcd.client.client import Client
from crust.cluster.etcd.keys import Keys
from crust.cluster.etcd.node_side import EtcdNodeSide
from crust.cluster.protocol import Answer
from examples.cluster.authority import DAY, Authority, Pair
from examples.cluster.etcd import PREFIX, Etcd
from tests.support.cluster.cluster_contract import WAIT_S, announcement, eventually, request
from tests.support.cluster.etcd_cluster import EtcdCluster

HOUR = timedelta(hours=1)


async def announcing(
    etcd: Etcd, files: Files, stack: AsyncExitStack, node: str = "n1"
) -> EtcdNodeSide:
    """A node with these certificates, which looks at its files all the time."""
    channels = Channels([each.address for each in etcd.members], files)
    await stack.enter_async_context(channels.opened(reload_s=0.05))
    side = EtcdNodeSide(Client(channels), Keys(PREFIX), node, 5)
    return await stack.enter_async_context(side.connected())


@pytest.fixture
def own(etcd: Etcd, tmp_path: Path) -> Files:
    """The certificate files of a node n1, in a directory of the test."""
    files = Authority(tmp_path).files("n1")
    Path(files.ca).write_bytes(etcd.authority.ca.read_bytes())
    write(files, etcd.authority.issue("n1"))
    return files


def write(files: Files, pair: Pair) -> None:
    """Replace them, one after the other."""
    Path(files.cert).write_bytes(pair.cert)
    Path(files.key).write_bytes(pair.key)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"begins": -2 * DAY, "ends": -DAY}, "the certificate expired "),
        ({"begins": HOUR}, "the certificate is valid from "),
        ({"has_usage": False}, "its extended key usage is not clientAuth"),
    ],
)
async def test_certificate_that_is_refused_is_explained_and_replaced_without_a_restart(
    etcd: Etcd, cluster: EtcdCluster, own: Files, changed: dict[str, timedelta], why: str
) -> None:
    write(own, etcd.authority.issue("n1", **changed))  # type: ignore[arg-type]
    controller = await cluster.controller()
    async with AsyncExitStack() as stack:
        node = await announcing(etcd, own, stack)
        with pytest.raises(failures.StoreCertificateRefused) as refused:
            await node.announce(announcement("n1"))
        assert why in refused.value.why
        write(own, etcd.authority.issue("n1"))
        await eventually(lambda: "n1" in controller.nodes())


async def test_certificate_of_another_authority_is_explained(
    etcd: Etcd, own: Files, tmp_path: Path
) -> None:
    write(own, Authority(tmp_path, "other").issue("n1"))
    async with AsyncExitStack() as stack:
        node = await announcing(etcd, own, stack)
        with pytest.raises(failures.StoreCertificateRefused, match="not signed by an authority of"):
            await node.announce(announcement("n1"))


async def test_authority_that_did_not_sign_the_members_certificate_is_explained(
    etcd: Etcd, own: Files, tmp_path: Path
) -> None:
    Path(own.ca).write_bytes(Authority(tmp_path, "other").ca.read_bytes())
    async with AsyncExitStack() as stack:
        node = await announcing(etcd, own, stack)
        with pytest.raises(
            failures.StoreCertificateRefused, match="the member's certificate is not signed"
        ):
            await node.announce(announcement("n1"))


async def test_files_that_are_missing_are_named_and_found_when_they_appear(
    etcd: Etcd, cluster: EtcdCluster, own: Files
) -> None:
    kept = Path(own.key).read_bytes()
    Path(own.key).unlink()
    controller = await cluster.controller()
    async with AsyncExitStack() as stack:
        node = await announcing(etcd, own, stack)
        with pytest.raises(failures.StoreCertificateRefused, match=own.key):
            await node.announce(announcement("n1"))
        Path(own.key).write_bytes(kept)
        await eventually(lambda: "n1" in controller.nodes())


async def test_certificate_of_another_node_can_neither_announce_nor_read_nor_answer(
    etcd: Etcd, cluster: EtcdCluster
) -> None:
    """n10 begins with n1: the range of a role ends with a slash."""
    controller = await cluster.controller()
    async with AsyncExitStack() as stack:
        for foreign in ("n2", "n10"):
            node = await announcing(etcd, etcd.files(foreign), stack)
            with pytest.raises(failures.StoreAccessDenied, match=foreign):
                await node.announce(announcement("n1"))
            with pytest.raises(failures.StoreAccessDenied, match=foreign):
                await node.answer(dataclasses.replace(request(), delivery=1), Answer(0))
            with pytest.raises(failures.StoreAccessDenied, match=foreign):
                await writes.listing(node._client, *node._keys.requests("n1"), what="the test")
    assert controller.nodes() == {}
    assert etcd.keys() == []


async def test_node_that_claims_to_be_another_one_is_left_out(
    etcd: Etcd, cluster: EtcdCluster
) -> None:
    """Below its own directory a node that was taken over can write what it likes."""
    controller = await cluster.controller()
    liar, honest = await cluster.node("n2"), await cluster.node("n10")
    await liar.announce(announcement("n1"))
    await honest.announce(announcement("n10"))
    await eventually(lambda: "n10" in controller.nodes())
    assert set(controller.nodes()) == {"n10"}


async def test_pool_is_known_where_it_was_announced_last(etcd: Etcd, cluster: EtcdCluster) -> None:
    """A disk that moved to another node, and back."""
    controller = await cluster.controller()
    for name in ("n1", "n2", "n1"):
        async with connect.node_side(etcd.settings(name), name) as node:
            await node.announce(announcement(name, "pool"))
            await eventually(lambda: controller.known_pools() == {"pool": name})  # noqa: B023
            await eventually(lambda: set(controller.nodes()) == {name})  # noqa: B023


async def test_certificates_are_replaced_under_load_without_a_lost_request(
    etcd: Etcd, cluster: EtcdCluster, own: Files
) -> None:
    controller = await cluster.controller()
    rounds = 60

    async def serve(node: EtcdNodeSide) -> None:
        async for each in node.requests():
            await node.answer(each, Answer(0, "", each.message))

    async with AsyncExitStack() as stack:
        node = await announcing(etcd, own, stack)
        await node.announce(announcement("n1"))
        serving = asyncio.create_task(serve(node))
        async with controller.lead("c"):
            for number in range(rounds):
                if number % 10 == 0:
                    write(own, etcd.authority.issue("n1"))
                asked = controller.ask("n1", request(number, str(number).encode()), WAIT_S)
                assert (await asked).response == str(number).encode()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
