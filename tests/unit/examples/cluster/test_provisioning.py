"""examples.cluster.provisioning: who creates a claim's volume, where each node's driver is called by its own node."""

from collections.abc import Mapping
from typing import cast

import grpc
import grpc.aio
import pytest

from crust.wire.csi.v1 import csi_pb2
from examples.cluster.provisioning import ApiServer, Claim, Provisioner
from examples.kata.demo.kubelet import Kubelet

GIB = 1 << 30


class Node:
    """The calls of a provisioner to the driver of its node, which has `free_bytes`."""

    def __init__(self, name: str, free_bytes: int) -> None:
        self.name = name
        self.free_bytes = free_bytes
        self.asked: list[tuple[str, Mapping[str, str]]] = []

    async def topology(self) -> dict[str, str]:
        return {"node": self.name}

    async def capacity(self, topology: Mapping[str, str]) -> tuple[int, int]:
        assert topology == {"node": self.name}
        return self.free_bytes, self.free_bytes

    async def create(
        self, name: str, size_bytes: int, *, topology: Mapping[str, str]
    ) -> csi_pb2.Volume:
        self.asked.append((name, topology))
        if size_bytes > self.free_bytes:
            code, metadata = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(code, metadata, metadata)
        self.free_bytes -= size_bytes
        return csi_pb2.Volume(volume_id=f"{self.name}-{name}")


@pytest.fixture
def nodes() -> list[Node]:
    return [Node("a", 2 * GIB), Node("b", 3 * GIB)]


@pytest.fixture
async def cluster(nodes: list[Node]) -> tuple[ApiServer, list[Provisioner]]:
    api = ApiServer()
    provisioners = [Provisioner(node.name, cast("Kubelet", node), api) for node in nodes]
    for provisioner in provisioners:
        await provisioner.publish_capacity()
    return api, provisioners


async def test_selected_node_alone_creates_in_its_topology(
    nodes: list[Node], cluster: tuple[ApiServer, list[Provisioner]]
) -> None:
    api, provisioners = cluster
    for wanted, expected in (("a", "a"), ("", "b")):
        claim = Claim(f"claim-{wanted}", GIB)
        assert api.schedule(claim, wanted)
        for provisioner in provisioners:
            await provisioner.sync(claim)
            await provisioner.sync(claim)
        assert claim.volume is not None
        assert claim.volume.volume_id.partition("-")[0] == expected
    assert [node.asked for node in nodes] == [
        [("claim-a", {"node": "a"})],
        [("claim-", {"node": "b"})],
    ]


async def test_claim_larger_than_each_pool_is_pending_unasked(
    nodes: list[Node], cluster: tuple[ApiServer, list[Provisioner]]
) -> None:
    api, provisioners = cluster
    claim = Claim("huge", 4 * GIB)
    assert not api.schedule(claim)
    for provisioner in provisioners:
        await provisioner.sync(claim)
    assert not any(node.asked for node in nodes)


async def test_pool_that_was_filled_since_gives_the_selection_back(
    nodes: list[Node], cluster: tuple[ApiServer, list[Provisioner]]
) -> None:
    api, provisioners = cluster
    nodes[1].free_bytes = 0
    claim = Claim("late", GIB)
    assert api.schedule(claim)
    for provisioner in provisioners:
        await provisioner.sync(claim)
    assert (claim.selected_node, claim.volume) == ("", None)
    await provisioners[1].publish_capacity()
    assert api.schedule(claim)
    assert claim.selected_node == "a"
